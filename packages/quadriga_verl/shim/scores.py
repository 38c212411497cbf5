# SPDX-License-Identifier: Apache-2.0
"""`verl.utils.reward_score`: our graders with verl's arguments and returns. Where they judge otherwise: docs.

Nothing here loads torch; a grader's library is loaded with its first sample.
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
    """The score by the rule of the data source; with the grader of DAPO a dict with "score", "acc" and "pred".
    Raises NotImplementedError: no grader knows the data source."""
    try:
        name = grader_name(data_source)
    except RewardError as error:
        raise NotImplementedError(str(error)) from error
    # A server takes care of its own memory; programs that run here have a limit.
    options = {"sandbox_url": sandbox_fusion_url} if name == "code" and sandbox_fusion_url else {}
    if name == "code" and memory_limit_mb is not None and not options:
        options["memory_megabytes"] = memory_limit_mb
    graded = _grade(data_source, solution_str, ground_truth, extra_info, **options)
    if name == "math_dapo":
        return {key: graded[key] for key in ("score", "acc", "pred")}
    return float(graded["score"])


def gsm8k_compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another one in the right form, else 0."""
    options: dict[str, Any] = {"method": method, "format_score": format_score, "score": score}
    return float(gsm8k.compute_score(solution_str, ground_truth, **options)["score"])


def gsm8k_extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> str | None:
    """The number of the answer as text, without separators; None where there is none."""
    return plain_text(gsm8k.extract_solution(solution_str, method))


def math_compute_score(solution_str: str, ground_truth: str) -> float:
    """1 for a box that means the same as the ground truth, else 0; see `graders.math`."""
    # Without a box our grader takes the end of the text; verl's gives 0.
    return (
        float(load_grader("math")(solution_str, ground_truth)["score"])
        if last_box(solution_str)
        else 0.0
    )


def math_verify_compute_score(
    model_output: str, ground_truth: str, timeout_score: float = 0, **limits: Any
) -> float:
    """The same, box or not; `timeout_score` where a comparison takes too long."""
    try:
        return float(load_grader("math")(model_output, ground_truth)["score"])
    except TimeoutError:
        return timeout_score


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers mean the same."""
    if str1 is None or str2 is None:
        return str1 is str2
    return str1.strip() == str2.strip() or math_compute_score(f"\\boxed{{{str1}}}", str2) == 1.0


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Whether an answer is the true one."""
    return given_answer is not None and is_equiv(given_answer, ground_truth)


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{...}` of a text with its command; None where there is none."""
    box = last_box(string)
    return None if box is None else f"\\boxed{{{box}}}"


def remove_boxed(s: str) -> str:
    """What stands inside a `\\boxed{...}`, `\\fbox{...}` or `\\boxed ...`; ValueError where it is none."""
    found = re.fullmatch(r"\\f?box(?:ed)?(?:\{(.*)\}| (.*))", s, re.DOTALL)
    if found is None:
        raise ValueError(f"remove_boxed: got {s[:80]!r}, expected \\boxed{{...}}")
    return found[1] if found[1] is not None else found[2]


def math_dapo_compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """ "score" 1 or -1, "acc" and "pred"; with `strict_box_verify` the last box alone counts, as text."""
    if not strict_box_verify:
        graded = math_dapo.compute_score(solution_str, ground_truth)
        return {"score": graded["score"], "acc": bool(graded["acc"]), "pred": graded["pred"]}
    box = last_box(solution_str[-100:])
    return {"score": 1.0 if box == ground_truth else -1.0, "acc": box == ground_truth, "pred": box}


def math_dapo_verify(
    solution_str: str, answer: str, *options: Any, **named: Any
) -> tuple[bool, str | None]:
    """Whether the answer is right, and the answer that was read."""
    graded = math_dapo_compute_score(solution_str, answer, *options, **named)
    return graded["acc"], graded["pred"]


def geo3k_compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """The weighted sum of `geo3k_acc_reward` and the form; see `graders.geometry3k`."""
    form = float(load_grader("geometry3k")(predict_str, ground_truth)["format"])
    return (1.0 - format_score) * geo3k_acc_reward(
        predict_str, ground_truth, use_boxed
    ) + format_score * form


def geo3k_acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1 for the right answer, else 0; without `use_boxed` the whole text is the answer."""
    return math_compute_score(
        predict_str if use_boxed else f"\\boxed{{{predict_str}}}", ground_truth
    )


def _question_score(metric: str) -> Callable[..., float]:
    def compute_score(
        solution_str: str,
        ground_truth: Any,
        method: str = "strict",
        format_score: float = 0.0,
        score: float = 1.0,
    ) -> float:
        options: dict[str, Any] = {"metric": metric}
        if question_answering.compute_score(solution_str, ground_truth, **options)["score"] == 1.0:
            return score
        return format_score if last_answer(solution_str) else 0.0

    return compute_score


em_compute_score, subem_compute_score = _question_score("em"), _question_score("sub_match")


def em_check(prediction: str, golden_answers: Any) -> bool:
    """Whether a text is one of the accepted answers, but for case, articles and punctuation."""
    return bool(em_compute_score(f"<answer>{prediction}</answer>", golden_answers))


def subem_check(prediction: str, golden_answers: Any) -> bool:
    """Whether one of the accepted answers stands in a text."""
    return bool(subem_compute_score(f"<answer>{prediction}</answer>", golden_answers))


def prime_math_compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """Whether the answer is right, whether it has the form of steps and a box, and the answer."""
    is_right = math_verify_compute_score(model_output, str(ground_truth)) == 1.0
    return (
        is_right,
        "Step 2:" in model_output and "\\box" in model_output,
        last_box(model_output) or model_output,
    )


def prime_code_compute_score(
    completion: str, test_cases: Any, continuous: bool = False
) -> tuple[float, list[Any]]:
    """The share of passed tests (all or none unless `continuous`), and what each test gave; see `graders.code`."""
    graded = load_grader("code")(completion, test_cases, use_partial_credit=continuous)
    return float(graded["score"]), [graded]
