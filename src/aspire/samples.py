"""Text that the package ships: GSM8K problems (MIT, see NOTICE) for demo, benchmarks and calibration."""

import json
import re
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and its worked answer, which ends in "#### number"."""

    question: str
    answer: str


def gsm8k_sample() -> list[Problem]:
    """The shipped problems, in the test set's order; calculator marks are taken out of the answers."""
    text = (files("aspire") / "data" / "gsm8k_sample.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    return [Problem(entry["question"], re.sub(r"<<.*?>>", "", entry["answer"])) for entry in entries]


def worked_examples(problems: list[Problem], question: str) -> str:
    """A few-shot prompt: solved problems, then a question whose answer is left to write."""
    solved = "".join(f"Question: {problem.question}\nAnswer: {problem.answer}\n\n" for problem in problems)
    return f"{solved}Question: {question}\nAnswer:"
