# SPDX-License-Identifier: Apache-2.0
"""Replicas of one model in several processes, over gloo: they learn together what one process learns alone.

What none of this proves: the same on NCCL, where the order of additions is another; tests/gpu is for that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quadriga.protocol import DataProto
from tests.numerics.launching import run_ranks
from tests.numerics.replicas import ASKED_BY, CASES, WORK

PROGRAM = Path(__file__).with_name("replicas.py")
SIZES = (2, 3, 4)
# What a rank computes depends on its rows: a prompt is computed once by each rank that has an answer to it.
OWN = ("actor/packed_tokens", "critic/packed_tokens")
LEARNED = [name for name in CASES if name != "not finite"]

Results = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def results(folder: Path, make_model: Callable, make_batch: Callable[[], DataProto]) -> Results:
    """What every case gave, by the number of processes."""
    make_model().save_pretrained(folder / "model")
    batch = make_batch()
    batch.batch["values"] = batch.batch["advantages"] * 0.3
    batch.batch["returns"] = batch.batch["advantages"] + 1.0
    batch.save_to_disk(folder / "batch")
    run_ranks(PROGRAM, 4, folder, num_ports=4)
    return {size: torch.load(folder / f"{size}.pt") for size in (1, *SIZES)}


@pytest.fixture(scope="module")
def resumed(results: Results, folder: Path) -> dict[str, Any]:
    return torch.load(folder / "resumed.pt")


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all tensors, relative to each one's norm."""
    assert ours.keys() == theirs.keys() and ours
    return max(
        float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12))
        for name in theirs
    )


def assert_same_metrics(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """But for the work of a rank, and for what only several ranks have."""
    names = {name for name in theirs if name not in OWN and not name.startswith("perf/")}
    assert names == {name for name in ours if name not in OWN and not name.startswith("perf/")}
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("case", "size"), [(name, size) for name in LEARNED for size in CASES[name].sizes]
)
def test_learns_as_one_process(results: Results, case: str, size: int) -> None:
    """Gradients (after several steps their moving average), weights and metrics; the replicas have the same bits."""
    together, alone = results[size][case], results[1][case]
    assert together["is_equal"]
    if case != "no advantage":
        assert largest_difference(together["moments"], alone["moments"]) < 1e-5
    assert largest_difference(together["weights"], alone["weights"]) < 1e-5
    assert_same_metrics(together["metrics"], alone["metrics"])


def test_cases_are_not_empty(results: Results) -> None:
    """The weights have moved where there was something to learn; where there was not, metrics are told all the same."""
    alone = {case: results[1][case]["weights"] for case in LEARNED}
    assert float(alone.pop("critic")["value_head.linear.weight"].abs().max()) > 1e-3
    untouched = alone.pop("no advantage")
    for case, weights in alone.items():
        assert largest_difference(weights, untouched) > 1e-3, case
    assert results[4]["no advantage"]["metrics"]["actor/entropy"] > 1
    assert results[4]["no advantage"]["metrics"]["actor/computed_sequences"] == 0
    assert results[4]["three rows"]["metrics"]["actor/computed_sequences"] == 3


@pytest.mark.parametrize("size", CASES["not finite"].sizes)
def test_a_gradient_that_is_not_finite_is_skipped_by_all(results: Results, size: int) -> None:
    """Only one rank has the broken row; all skip the step, and all give up at the same one."""
    broken = results[size]["not finite"]
    assert broken["is_equal"] and broken["moments"] == {}
    assert broken["metrics"]["actor/nonfinite_steps"] == 1
    assert "2 gradients in a row that are not finite" in results[size]["gave up"]


@pytest.mark.parametrize("size", [size for size in ASKED_BY if size > 1])
def test_asked_as_one_process(results: Results, size: int) -> None:
    """Three rows on up to four ranks, of which the last then has none."""
    for name, values in results[1]["asked"].items():
        torch.testing.assert_close(results[size]["asked"][name], values, atol=1e-6, rtol=1e-5)


def test_resumes_with_another_number_of_processes(
    results: Results, resumed: dict[str, Any]
) -> None:
    """One process goes on from a checkpoint of two, and two from one of one, as if nothing had happened."""
    for name in ("2 from 1", "1 from 2"):
        assert resumed[name]["is_equal"]
        for part in ("weights", "moments"):
            assert largest_difference(resumed[name][part], results[1]["undisturbed"][part]) < 1e-5


@pytest.mark.parametrize(
    ("size", "count"), [(size, count) for size in SIZES for count in WORK[size]]
)
def test_the_worker_works_as_one_process(results: Results, size: int, count: int) -> None:
    """Answers, sampled before an update and greedy after it, log-probs and metrics, with the samples of a prompt on
    several ranks, and with a rank that has no row."""
    together, alone = results[size][f"work {count}"], results[1][f"work {count}"]
    for name in ("responses", "response_mask", "input_ids", "greedy"):
        assert torch.equal(together[name], alone[name]), name
    for name in ("old_log_probs", "ref_log_prob", "entropys", "rollout_log_probs"):
        torch.testing.assert_close(together[name], alone[name], atol=1e-5, rtol=1e-5)
    assert_same_metrics(together["metrics"], alone["metrics"])
    assert together["metrics"]["perf/imbalance/actor"] >= 1


@pytest.mark.parametrize("size", SIZES)
def test_counts_add_up(results: Results, size: int) -> None:
    assert results[size]["totals"] == [size * (size - 1) // 2, size]


def test_roles_of_one_process_share_a_group_of_one_shape(results: Results) -> None:
    assert (
        "got rank 0 of 2 in this process already, expected rank 0 of 3" in results[2]["other shape"]
    )


def test_a_process_that_dies_is_said(resumed: dict[str, Any]) -> None:
    """The error of who is left names the collective and says that the cause is elsewhere."""
    assert "rank 0 of 2 in the sum of gradients" in resumed["left alone"]
    assert "another rank" in resumed["left alone"]


def test_replicas_that_differ_are_refused(resumed: dict[str, Any]) -> None:
    assert "other numbers on rank 1 than on rank 0" in resumed["unlike"]
