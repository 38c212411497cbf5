# SPDX-License-Identifier: Apache-2.0
"""A response of one piece, thousands of times, is graded in time that is linear in its length, by every grader."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.rewards.graders import (
    exact_match,
    geometry3k,
    gsm8k,
    largest_number,
    math,
    math_dapo,
    question_answering,
)
from quadriga.rewards.graders.code import extract_program
from quadriga.rewards.graders.reading import last_answer
from quadriga.rewards.managers.judge import JudgeQuestion

LENGTHS = (4_000, 64_000)
PIECES = [
    "<answer>", "</answer>", "<answer></answer>", " ", "\n", "#### ", "#### -", "-", "$", "1", "1,", "1,111,", "1.",
    "a ", "\\boxed{", "\\boxed{}", "{", "}", "\\", "Answer:", "answer: \n", "```", "```python\n", " ```\n", "\\text{",
    "\\frac{1}{", "the ", "=", "x = ", "\\left(", "score:",
]  # fmt: skip
GRADERS: dict[str, Callable[[str], object]] = {
    "exact_match": lambda text: exact_match.compute_score(text, "5"),
    "gsm8k": lambda text: gsm8k.compute_score(text, "5"),
    "gsm8k flexible": lambda text: gsm8k.compute_score(text, "5", method="flexible"),
    "largest_number": lambda text: largest_number.compute_score(text, "5"),
    "math_dapo": lambda text: math_dapo.compute_score(text, "5", use_symbols=False),
    "question_answering": lambda text: question_answering.compute_score(text, "5"),
    "code": extract_program,
    "tags": last_answer,
    "judge": lambda text: JudgeQuestion("x", "", r"(?i)score\s*:\s*(-?[0-9.]+)").read_score(
        f"score: 1 {text}"
    ),
}


def seconds(function: Callable[[str], object], text: str, repeats: int = 3) -> float:
    """The shortest time of this process alone."""
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        function(text)
        times.append(time.process_time() - begun)
    return min(times)


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize("before", ["", "#### ", "Answer: ", "<answer>"])
def test_time_is_linear(name: str, before: str) -> None:
    """16 times the text: linear is 16, quadratic 256; what takes less than 20 ms is neither."""
    for piece in PIECES:
        short_text, long_text = (before + (piece * length)[:length] for length in LENGTHS)
        if seconds(GRADERS[name], long_text, repeats=1) < 0.02:
            continue
        short = seconds(GRADERS[name], short_text)
        long = seconds(GRADERS[name], long_text)
        assert long < 0.02 or long < 64 * short, (piece, short, long)


@pytest.mark.parametrize("piece", ["\\( ", "\\[", "\\boxed{\\(}"])
@pytest.mark.parametrize("grade", [math.compute_score, geometry3k.compute_score])
def test_mathematics_is_read_from_the_end(grade: Callable[..., dict[str, Any]], piece: str) -> None:
    """math-verify is quadratic in what it is given, and would take more than its 5 s for 64,000 characters."""
    text = (piece * 64_000)[:64_000]
    assert grade(text, "5")["score"] == 0.0
    assert grade(f"{text} The answer is $5$.", "5")["score"] == (
        "boxed" not in piece and grade is math.compute_score
    )
    assert math.compute_score(f"\\boxed{{{text}}}", "5")["score"] == 0.0


@given(
    st.lists(st.sampled_from(["<answer>", "</answer>", "a", "\n", "<answer"]), max_size=12).map(
        "".join
    )
)
def test_last_answer(text: str) -> None:
    """What the plain expression finds, in another time."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert last_answer(text) == (found[-1] if found else None)
