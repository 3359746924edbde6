"""Long prompts of real text: solved problems strung together, a different window for each request."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aspire.samples import Problem, worked_examples

FIELDS = (("question", "problem", "prompt"), ("answer", "solution", "response"))


def read_problems(path: str) -> list[Problem]:
    """Problems of a JSON-lines file with fields question or problem, and answer or solution.

    Raises ValueError naming file and line.
    """
    problems = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data must be readable JSON lines, got {path!r} ({error})") from None
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            question, answer = (next(entry[name] for name in names if name in entry) for names in FIELDS)
        except (json.JSONDecodeError, RuntimeError, TypeError, KeyError):  # a generator that ends early: RuntimeError
            raise ValueError(f"data must be JSON lines with a question and an answer, got {path!r} line {number}: "
                             f"{line[:60]!r}") from None
        problems.append(Problem(_text(question), re.sub(r"<<.*?>>", "", _text(answer))))
    return problems


def _text(value: object) -> str:
    """Some sets hold a list of solutions: the first."""
    return str(value[0]) if isinstance(value, list) and value else str(value)


class Windows:
    """Makes prompts; tokenizes each problem once."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Any) -> None:
        self._problems = list(problems)
        self._tokenizer = tokenizer
        self._solved: dict[int, list[int]] = {}

    def contexts(self, count: int, length: int, *, seed: int) -> list[list[int]]:
        """`count` few-shot prompts of exactly `length` tokens, cut at the front, each with a question to answer at
        its end. Questions differ as long as there are enough problems.

        Raises ValueError when the problems are too few for one prompt.
        """
        order = list(range(len(self._problems)))
        random.Random(seed).shuffle(order)
        return [self._context(order[index % len(order)], length, random.Random(f"{seed}-{index}"))
                for index in range(count)]

    def _context(self, asked: int, length: int, chance: random.Random) -> list[int]:
        tokens = self._tokens(worked_examples([], self._problems[asked].question))
        for index in self._others(asked, chance):
            if len(tokens) >= length:
                break
            if index not in self._solved:
                problem = self._problems[index]
                whole = worked_examples([problem], "")
                self._solved[index] = self._tokens(whole[: -len(worked_examples([], ""))])
            tokens = self._solved[index] + tokens
        if len(tokens) < length:
            raise ValueError(f"context must be at most {len(tokens)} tokens, all that the data holds, got {length}")
        return tokens[-length:]

    def _others(self, asked: int, chance: random.Random) -> Iterator[int]:
        others = [index for index in range(len(self._problems)) if index != asked]
        chance.shuffle(others)
        return iter(others)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
