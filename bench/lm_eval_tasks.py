"""Tasks for lm-eval-harness that need no download, made from the GSM8K sample of the package: give it a folder.

Writes gsm_choice (log-likelihoods of four answers), gsm_ppl (rolling log-likelihood) and gsm_gen (generation) with
their data; docs/server.md has the command that runs them against the server.
"""

import json
import random
import sys
from pathlib import Path

import aspire

COMMON = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASKS = {
    "gsm_choice": """output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "gsm_ppl": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}]
""",
    "gsm_gen": """output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
""",
}


def main(folder: Path) -> None:
    source = Path(aspire.__file__).parent / "data" / "gsm8k_sample.jsonl"
    problems = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    answers = [problem["answer"].split("####")[1].strip() for problem in problems]
    chance = random.Random(0)
    rows = []
    for problem, answer in zip(problems, answers, strict=True):
        choices = [answer, *chance.sample(sorted(set(answers) - {answer}), 3)]
        chance.shuffle(choices)
        rows.append({"question": problem["question"], "choices": choices, "label": choices.index(answer),
                     "text": f"{problem['question']} {problem['answer']}"})
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.resolve() / "gsm.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(data=data)}{text}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
