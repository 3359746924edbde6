"""A batch of prompts that differ in length, sampling and stops; the counters tell what speculation did for each.

    python examples/batch.py [MODEL] [POLICY]
"""

import sys

from aspire import LLM, SamplingParams
from aspire.samples import gsm8k_sample, worked_examples


def main(model: str = "smollm2-135m", policy: str = "aspire") -> None:
    problems = gsm8k_sample()
    llm = LLM(model, policy=policy, max_num_seqs=4, max_model_len=2048)
    prompts = [
        "A haiku about the sea:\n",
        llm.render_chat([{"role": "user", "content": problems[0].question}]),
        worked_examples(problems[1:6], problems[6].question),
    ]
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=32),
        SamplingParams(temperature=0.0, max_tokens=48),
        SamplingParams(temperature=0.0, max_tokens=48, stop=["Question:"]),
    ]
    for out in llm.generate(prompts, params):
        done, metrics = out.outputs[0], out.metrics
        assert metrics is not None
        print(f"--- {len(out.prompt_token_ids)} tokens in, {len(done.token_ids)} out ({done.finish_reason}); "
              f"{metrics.num_accepted} of {metrics.num_drafted} drafts accepted in {metrics.num_verifications} "
              "verifications")
        print(done.text.strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
