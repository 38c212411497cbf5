# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` with vLLM."""

from pathlib import Path

import pytest

from small_runs import require_run

ROLLOUT = "+actor_rollout_ref.rollout"
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=5e-2",
    "actor_rollout_ref.actor.use_kl_loss=True",
)
ELSEWHERE = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, ref: training, rollout: generation}",
    "trainer.resource_pools.generation=[1]",
)
"""The rollout in a process of its own, to which weights are broadcast."""
TWO = (
    *ELSEWHERE[:2],
    "trainer.resource_pools.generation=[2]",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)
"""The same on the devices of two ranks, with two processes of vLLM's."""


@pytest.mark.parametrize(
    "place",
    [f"{ROLLOUT}.engine_kwargs.vllm.block_size=32", f"{ROLLOUT}.tensor_model_parallel_size=2"],
    ids=["in the run's process", "beside it"],
)
def test_a_run_generates_with_the_weights_that_it_trains(
    place: str, folder: str, tmp_path: Path
) -> None:
    """See `require_run`."""
    require_run("vllm", folder, tmp_path, place)


def test_a_run_generates_beside_training(folder: str, tmp_path: Path) -> None:
    """See `require_run`, of steps that learn from the newest weights alone; on Ray, by a rank of its own."""
    require_run(
        "vllm",
        folder,
        tmp_path,
        *ELSEWHERE,
        "async_training.enable=True",
        "async_training.max_staleness=0",
    )


@pytest.mark.parametrize(
    ("keeps", "place", "told"),
    [
        ("recompute", (), "in processes of its own (1)"),
        ("keep", (), "in processes of its own (1)"),
        ("keep", TWO, "in processes of its own (2)"),
    ],
    ids=["recompute", "keep", "keep, on Ray by two processes"],
)
def test_a_run_takes_weights_under_way(
    keeps: str, place: tuple[str, ...], told: str, folder: str, tmp_path: Path
) -> None:
    """An adapter merged, with so few places that the last batch is under way as weights come."""
    words = [
        f"async_training.{word}"
        for word in ("enable=True", "max_staleness=2", f"kv_on_update={keeps}")
    ]
    words += [f"actor_rollout_ref.rollout.{word}" for word in ("max_num_seqs=4", "ignore_eos=True")]
    more = (*words, *place, "data.max_response_length=96", "trainer.save_freq=2", *LORA[:1])
    lines, said = require_run("vllm", folder, tmp_path, *more, is_stale=True)
    assert "goes merged (in asynchronous training sequences in flight" in said and told in said
    assert all(
        line["async/staleness_max"] <= 2 and line["rollout_corr/rollout_is_mean"] > 0
        for line in lines
    )
    assert sum(line["async/interruptions"] for line in lines) > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "goes alone, after the weights below it (vLLM applies it beside the weights)"),
        (
            ("actor_rollout_ref.rollout.mode=async",),
            "the adapter beside them, with room for rank 8",
        ),
        (ELSEWHERE, "the adapter beside them, with room for rank 8"),
        (("actor_rollout_ref.model.lora_merge=true",), "goes merged (lora_merge=true)"),
    ],
    ids=["alone", "alone, beside", "alone, elsewhere", "merged"],
)
def test_a_run_generates_with_the_adapter_that_it_trains(
    more: tuple[str], told: str, folder: str, tmp_path: Path
) -> None:
    """The log-probabilities are the trainer's up to rounding; those without an adapter, the reference's, are not."""
    lines, said = require_run(
        "vllm", folder, tmp_path, f"{ROLLOUT}.engine_kwargs.vllm.block_size=32", *LORA, *more
    )
    assert told in said
    assert all(line["rollout/log_prob_diff_max"] < 2e-4 for line in lines), lines
    assert lines[2]["actor/kl_loss"] > 0.1
