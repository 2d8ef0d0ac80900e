"""The demo's tasks: short puzzles on words of ten letters whose answers a program can check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

SYMBOLS = "abcdefghij"
MIN_LENGTH, MAX_LENGTH = 6, 9


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of puzzle: a word goes in, its answer has as many symbols.

    Attributes:
        name: What texts call it.
        answer: The right answer of a word; both hold indices into `SYMBOLS`.
    """

    name: str
    answer: Callable[[list[int]], list[int]]


def _swapped(word: list[int]) -> list[int]:
    """Neighbours trade places; the last symbol of an odd word stays."""
    out = list(word)
    for i in range(0, len(word) - 1, 2):
        out[i], out[i + 1] = word[i + 1], word[i]
    return out


TASKS = (
    Task("copy", list),
    Task("reverse", lambda word: word[::-1]),
    Task("swap", _swapped),
    Task("rotate", lambda word: [*word[1:], word[0]]),
    Task("shift", lambda word: [(symbol + 3) % len(SYMBOLS) for symbol in word]),
    Task("maximum", lambda word: [max(word[: i + 1]) for i in range(len(word))]),
)

PAD, END = 0, 1
_FIRST_TASK = 2
EQUALS = _FIRST_TASK + len(TASKS)
_FIRST_SYMBOL = EQUALS + 1
NUM_TOKENS = _FIRST_SYMBOL + len(SYMBOLS)
MAX_PROMPT, MAX_ANSWER = MAX_LENGTH + 2, MAX_LENGTH + 1


class Question(NamedTuple):
    """A prompt ``TASK word =`` and the answer that counts, ``answer END``, in tokens."""

    task: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def task_of(instruction: torch.Tensor) -> torch.Tensor:
    """Tasks of sequences by their first token."""
    return instruction - _FIRST_TASK


def question(task: int, random: np.random.Generator) -> Question:
    """A question of a kind, its word drawn at random."""
    kind = TASKS[task]
    word: list[int] = random.integers(0, len(SYMBOLS), int(random.integers(MIN_LENGTH, MAX_LENGTH + 1))).tolist()
    return Question(
        task,
        (_FIRST_TASK + task, *(_FIRST_SYMBOL + symbol for symbol in word), EQUALS),
        (*(_FIRST_SYMBOL + symbol for symbol in kind.answer(word)), END),
    )


def questions(num: int, random: np.random.Generator) -> list[Question]:
    """As many questions of every task as `num` allows, task by task, as from a data set that is read source by source."""
    return [question(i * len(TASKS) // num, random) for i in range(num)]


def with_mistakes(answer: Sequence[int], share: float, random: np.random.Generator) -> tuple[int, ...]:
    """The answer with about a `share` of its symbols replaced by others; its end stays."""
    wrong = random.random(len(answer) - 1) < share
    other = _FIRST_SYMBOL + random.integers(0, len(SYMBOLS), len(wrong))
    return (*np.where(wrong, other, answer[:-1]).tolist(), answer[-1])


def reward(asked: Question, answer: Sequence[int]) -> float:
    """1 for exactly the right answer with its end, else 0."""
    return float(tuple(answer) == asked.answer)


def text(tokens: Sequence[int]) -> str:
    """Tokens as a person would write them."""
    return " ".join(_word(token) for token in tokens)


def _word(token: int) -> str:
    if token in (PAD, END, EQUALS):
        return {PAD: "_", END: ".", EQUALS: "="}[token]
    if token < EQUALS:
        return TASKS[token - _FIRST_TASK].name
    return SYMBOLS[token - _FIRST_SYMBOL]
