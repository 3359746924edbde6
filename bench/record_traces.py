"""Records verifications of a real model at full draft length, for `aspire bench simulate --traces`.

    python bench/record_traces.py OUT.jsonl [--model smollm2-135m] [--requests 6] [--context 1200] [--tokens 320]

Prompts are sample problems strung together and a last question; one JSON line per request.
"""

import argparse
import json
from pathlib import Path

from aspire import LLM, SamplingParams
from aspire.speculation.policy import Overrides
from aspire.stats import StepStats

SAMPLE = Path(__file__).resolve().parents[1] / "src" / "aspire" / "data" / "gsm8k_sample.jsonl"


class Recorder:
    """Keeps (drafted, accepted) of every verification with drafts, by request."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[tuple[int, int]]] = {}

    def on_step(self, stats: StepStats) -> None:
        for row in stats.rows:
            if row.kind == "verify" and row.num_drafted:
                self.rounds.setdefault(row.request_id, []).append((row.num_drafted, row.num_accepted))


def make_prompts(tokenizer: object, count: int, context: int) -> list[list[int]]:
    """Different problems for each request, as token ids."""
    problems = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    texts = [f"Question: {p['question']}\nAnswer: {p['answer']}\n\n" for p in problems]
    prompts = []
    for i in range(count):
        turned = texts[7 * i % len(texts):] + texts[:7 * i % len(texts)]
        ids = tokenizer("".join(turned) * 4)["input_ids"]  # type: ignore[operator]
        prompts.append(ids[:context])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--context", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    recorder = Recorder()
    llm = LLM(arguments.model, policy="synchronized-aspire", max_num_seqs=arguments.requests,
              max_model_len=arguments.context + arguments.tokens + 40, dtype="float32", observers=[recorder],
              overrides=Overrides(drafts=16, budget=arguments.budget))
    prompts = make_prompts(llm.get_tokenizer(), arguments.requests, arguments.context)
    llm.generate(prompts, [SamplingParams(temperature=arguments.temperature, seed=i, max_tokens=arguments.tokens,
                                          ignore_eos=True) for i in range(arguments.requests)])
    with arguments.out.open("w") as out:
        for rounds in recorder.rounds.values():
            print(json.dumps({"context": arguments.context, "rounds": rounds}), file=out)
    drafted = sum(d for rounds in recorder.rounds.values() for d, _ in rounds)
    accepted = sum(a for rounds in recorder.rounds.values() for _, a in rounds)
    print(json.dumps({"bench": "record_traces", "drafted": drafted, "accepted": accepted,
                      "verifications": sum(map(len, recorder.rounds.values()))}))


if __name__ == "__main__":
    main()
