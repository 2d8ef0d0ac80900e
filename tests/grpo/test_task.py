"""The puzzles: right answers, and rewards that only they get."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.grpo import task as tasks
from examples.grpo.task import END, MAX_ANSWER, MAX_PROMPT, SYMBOLS, TASKS, questions, reward, text, with_mistakes

ANSWERS = {
    "copy": ("fabacad", "fabacad"),
    "reverse": ("fabacad", "dacabaf"),
    "swap": ("abcdefg", "badcfeg"),
    "rotate": ("abcdefg", "bcdefga"),
    "shift": ("abcdhij", "defgabc"),
    "mirror": ("abcdhij", "jihgcba"),
    "maximum": ("badcfej", "bbddffj"),
    "sort": ("fabacad", "aaabcdf"),
}


@pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])
def test_the_answer_is_the_one_known_by_hand(task):
    word, answer = ANSWERS[task.name]
    assert "".join(SYMBOLS[i] for i in task.answer([SYMBOLS.index(letter) for letter in word])) == answer


@given(seed=st.integers(0, 2**32 - 1))
def test_only_the_whole_right_answer_is_rewarded(seed):
    random = np.random.default_rng(seed)
    asked = tasks.question(seed % len(TASKS), random)
    assert len(asked.prompt) <= MAX_PROMPT and len(asked.answer) <= MAX_ANSWER
    assert reward(asked, asked.answer) == 1.0
    at = int(random.integers(len(asked.answer)))
    other = tuple(token + (i == at) for i, token in enumerate(asked.answer))
    for wrong in (asked.answer[:-1], (*asked.answer, END), other, ()):
        assert reward(asked, wrong) == 0.0


def test_questions_come_task_by_task_and_are_a_function_of_the_seed():
    asked = questions(20, np.random.default_rng(3))
    kinds = [q.task for q in asked]
    assert kinds == sorted(kinds) and set(kinds) == set(range(len(TASKS)))
    assert asked == questions(20, np.random.default_rng(3)) != questions(20, np.random.default_rng(4))


def test_mistakes_change_about_their_share_of_symbols_and_never_the_end():
    random = np.random.default_rng(0)
    asked = questions(400, random)
    pairs = [(a, b) for q in asked for a, b in zip(q.answer[:-1], with_mistakes(q.answer, 0.2, random)[:-1], strict=True)]
    changed = np.mean([a != b for a, b in pairs])
    assert abs(changed - 0.2 * (1 - 1 / len(SYMBOLS))) < 0.03
    assert all(with_mistakes(q.answer, 1.0, random)[-1] == END for q in asked)
    assert all(with_mistakes(q.answer, 0.0, random) == q.answer for q in asked)


def test_tokens_read_as_text():
    asked = tasks.question(0, np.random.default_rng(0))
    word = " ".join(text(asked.answer[:-1]).split())
    assert text(asked.prompt) == f"copy {word} =" and text(asked.answer) == f"{word} ."
