# SPDX-License-Identifier: Apache-2.0
"""`verl.utils.reward_score`: Quadriga's graders with verl's arguments and results.

docs/from_verl.md says where they judge differently from verl. Nothing here loads torch, and the
library of a grader is loaded with its first sample.
"""

import re
from collections.abc import Callable
from typing import Any, Literal

from quadriga.errors import RewardError
from quadriga.rewards.graders import gsm8k, math_dapo, question_answering
from quadriga.rewards.graders.reading import last_answer, last_box, plain_text
from quadriga.rewards.scoring import default_compute_score as _grade
from quadriga.rewards.scoring import grader_name, load_grader


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """Grade a response by the grader of its data source.

    Args:
        data_source: name of the data set.
        solution_str: the response.
        ground_truth: the answer, in the form that the grader reads.
        extra_info: further columns of the row.
        sandbox_fusion_url: server that runs programs. None: they run on this machine.
        concurrent_semaphore: ignored; the server limits its own load.
        memory_limit_mb: limit for programs that run on this machine.
        kwargs: ignored.

    Returns:
        The score. With the grader of DAPO, a dictionary with "score", "acc" and "pred".

    Raises:
        NotImplementedError: there is no grader for the data source.
    """
    try:
        name = grader_name(data_source)
    except RewardError as error:
        raise NotImplementedError(str(error)) from error
    options = {}
    if name == "code":
        if sandbox_fusion_url:
            options["sandbox_url"] = sandbox_fusion_url
        elif memory_limit_mb is not None:
            options["memory_megabytes"] = memory_limit_mb
    graded = _grade(data_source, solution_str, ground_truth, extra_info, **options)
    if name == "math_dapo":
        return {key: graded[key] for key in ("score", "acc", "pred")}
    return float(graded["score"])


# ---- GSM8K --------------------------------------------------------------------------------------


def gsm8k_compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Grade an answer to GSM8K.

    Args:
        solution_str: the response.
        ground_truth: the right number.
        method: "strict" reads the number after `####`, "flexible" the last number.
        format_score: score of a wrong number in the right form.
        score: score of the right number.

    Returns:
        `score`, `format_score` or 0.
    """
    graded = gsm8k.compute_score(
        solution_str, ground_truth, method=method, format_score=format_score, score=score
    )
    return float(graded["score"])


def gsm8k_extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> str | None:
    """Extract the number of an answer as text without separators. Return None if there is none."""
    return plain_text(gsm8k.extract_solution(solution_str, method))


# ---- mathematics --------------------------------------------------------------------------------


def math_compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1 if the last box means the same as the ground truth, else 0; see `graders.math`."""
    # Without a box `graders.math` would read the end of the text. verl gives 0.
    if not last_box(solution_str):
        return 0.0
    return float(load_grader("math")(solution_str, ground_truth)["score"])


def math_verify_compute_score(
    model_output: str, ground_truth: str, timeout_score: float = 0, **limits: Any
) -> float:
    """Return 1 if the answer, boxed or not, means the same as the ground truth, else 0.

    Args:
        model_output: the response.
        ground_truth: the right answer.
        timeout_score: score if the comparison takes too long.
        limits: ignored.
    """
    try:
        return float(load_grader("math")(model_output, ground_truth)["score"])
    except TimeoutError:
        return timeout_score


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers mean the same; None is the same only as None. `verbose` is ignored."""
    if str1 is None or str2 is None:
        return str1 is str2
    return str1.strip() == str2.strip() or math_compute_score(f"\\boxed{{{str1}}}", str2) == 1.0


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Whether an answer means the same as the ground truth. None is no answer."""
    return given_answer is not None and is_equiv(given_answer, ground_truth)


def last_boxed_only_string(string: str) -> str | None:
    """Return the last `\\boxed{...}` of a text, with its command. None: there is none."""
    box = last_box(string)
    return None if box is None else f"\\boxed{{{box}}}"


def remove_boxed(s: str) -> str:
    """Return the content of a `\\boxed{...}`, `\\fbox{...}` or `\\boxed ...`.

    Raises:
        ValueError: the text has another form.
    """
    match = re.fullmatch(r"\\f?box(?:ed)?(?:\{(.*)\}| (.*))", s, re.DOTALL)
    if match is None:
        raise ValueError(f"remove_boxed: got {s[:80]!r}, expected \\boxed{{...}}")
    return match[1] if match[1] is not None else match[2]


def math_dapo_compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Grade an answer as DAPO does.

    Args:
        solution_str: the response.
        ground_truth: the right answer.
        strict_box_verify: whether to compare, as text, the last box among the last 100 characters.
        pause_tokens_index: ignored.

    Returns:
        "score", 1 or -1; "acc", whether the answer is right; "pred", the answer.
    """
    if not strict_box_verify:
        graded = math_dapo.compute_score(solution_str, ground_truth)
        return {"score": graded["score"], "acc": bool(graded["acc"]), "pred": graded["pred"]}
    box = last_box(solution_str[-100:])
    is_right = box == ground_truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": box}


def math_dapo_verify(
    solution_str: str, answer: str, *options: Any, **named: Any
) -> tuple[bool, str | None]:
    """Whether an answer is right by `math_dapo_compute_score`, and the answer that was read."""
    graded = math_dapo_compute_score(solution_str, answer, *options, **named)
    return graded["acc"], graded["pred"]


def geo3k_compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Weighted mean of `geo3k_acc_reward` and the score of the format; see `graders.geometry3k`.

    Args:
        predict_str: the response.
        ground_truth: the right answer.
        use_boxed: whether the answer must be in a box.
        format_score: weight of the format, between 0 and 1.
    """
    form = float(load_grader("geometry3k")(predict_str, ground_truth)["format"])
    accuracy = geo3k_acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * form


def geo3k_acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1 for the right answer, else 0. Without `use_boxed` the whole text is the answer."""
    answer = predict_str if use_boxed else f"\\boxed{{{predict_str}}}"
    return math_compute_score(answer, ground_truth)


def prime_math_compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """Grade an answer as PRIME does.

    Returns:
        Whether the answer is right, whether the text has steps and a box, and the content of the last
        box, or else the whole text.
    """
    is_right = math_verify_compute_score(model_output, str(ground_truth)) == 1.0
    is_formatted = "Step 2:" in model_output and "\\box" in model_output
    return is_right, is_formatted, last_box(model_output) or model_output


# ---- questions ----------------------------------------------------------------------------------


def _question_score(metric: str) -> Callable[..., float]:
    """Make a score function with verl's arguments for a metric of `question_answering`.

    The function returns `score` for a right answer, `format_score` for another answer, and 0 without
    one. It ignores `method`.
    """

    def compute_score(
        solution_str: str,
        ground_truth: Any,
        method: str = "strict",
        format_score: float = 0.0,
        score: float = 1.0,
    ) -> float:
        graded = question_answering.compute_score(solution_str, ground_truth, metric=metric)
        if graded["score"] == 1.0:
            return score
        return format_score if last_answer(solution_str) else 0.0

    return compute_score


em_compute_score = _question_score("em")
subem_compute_score = _question_score("sub_match")


def em_check(prediction: str, golden_answers: Any) -> bool:
    """Whether a text is an accepted answer, apart from case, articles and punctuation."""
    return bool(em_compute_score(f"<answer>{prediction}</answer>", golden_answers))


def subem_check(prediction: str, golden_answers: Any) -> bool:
    """Whether a text contains an accepted answer."""
    return bool(subem_compute_score(f"<answer>{prediction}</answer>", golden_answers))


# ---- programs -----------------------------------------------------------------------------------


def prime_code_compute_score(
    completion: str, test_cases: Any, continuous: bool = False
) -> tuple[float, list[Any]]:
    """Grade a program.

    Returns:
        1 if all tests pass, else 0, or with `continuous` the share of passed tests; and a list with the
        grader's result.
    """
    graded = load_grader("code")(completion, test_cases, use_partial_credit=continuous)
    return float(graded["score"]), [graded]
