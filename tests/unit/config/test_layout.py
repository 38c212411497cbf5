# SPDX-License-Identifier: Apache-2.0
"""How ranks are arranged, and what is said of sizes that do not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.config import Layout, ModelShape, check_model, load_config, training_findings
from quadriga.config.placement import arranged_roles
from quadriga.errors import ConfigError

PLAN = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
small = st.integers(1, 3)


@given(small, small, small, small, small)
def test_each_rank_has_a_place_of_its_own(
    pp: int, replicate: int, shard: int, sp: int, tp: int
) -> None:
    """And each data-parallel rank has pp x sp x tp processes, of which one answers, in the last stage."""
    layout = Layout(pp, replicate, shard, sp, tp)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len({(one.pp, one.dp_replicate, one.dp_shard, one.sp, one.tp) for one in places}) == len(
        places
    )
    for dp_rank in range(layout.dp_size):
        members = [one for one in places if one.dp_rank == dp_rank]
        assert len(members) == pp * sp * tp
        assert [one.pp for one in members if one.is_collected] == [pp - 1]


@pytest.mark.parametrize(
    ("world", "sizes", "layout"),
    [
        (1, {}, Layout()),
        (4, {}, Layout(dp_shard=4)),
        (4, {"fsdp": 1}, Layout(dp_replicate=4)),
        (4, {"fsdp": 2}, Layout(dp_replicate=2, dp_shard=2)),
        (8, {"sp": 2, "tp": 2}, Layout(dp_shard=2, sp=2, tp=2)),
        (8, {"fsdp": 2, "sp": 2, "pp": 2}, Layout(pp=2, dp_replicate=2, sp=2)),
        (8, {"fsdp": 4, "ep": 2}, Layout(dp_replicate=2, dp_shard=4, ep=2)),
    ],
)
def test_sizes_become_a_layout(world: int, sizes: dict[str, int], layout: Layout) -> None:
    assert Layout.of(world, "actor", **sizes) == layout
    assert layout.world_size == world


@pytest.mark.parametrize(
    ("world", "sizes", "told"),
    [
        (3, {"tp": 2}, "3 processes for tp=2 sp=1 pp=1"),
        (4, {"sp": 2, "pp": 4}, "expected a multiple of 8 processes"),
        (4, {"fsdp": 3}, "fsdp_size: got 3"),
        (4, {"fsdp": 1, "sp": 2}, "fsdp_size: got 1"),
        (
            4,
            {"ep": 3},
            "actor.expert_parallel_size: got 3, with 4 ranks that shard one copy of the weights",
        ),
        (4, {"fsdp": 1, "ep": 2}, "got 2, with 1 ranks"),
        (
            4,
            {"tp": 2, "ep": 2},
            "and tp=2, expected a number that divides them, or 1 with tensor parallelism",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(world: int, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Layout.of(world, "actor", **sizes)


def test_all_that_does_not_fit_a_model_is_told_at_once() -> None:
    shape = ModelShape("SomeModel", num_layers=3, num_heads=9, num_kv_heads=3, tensor_plan=None)
    with pytest.raises(ConfigError, match="SomeModel") as caught:
        check_model(Layout(pp=4, sp=2, tp=2), shape, "actor")
    for part in ("3 layers for 4", "without a plan", "9 heads and 3 key-value heads"):
        assert part in str(caught.value)
    check_model(Layout(pp=3, tp=3), ModelShape("SomeModel", 3, 9, 3, PLAN), "actor")


@pytest.mark.parametrize(
    ("count", "told"), [(0, "no experts"), (6, "6 experts for expert parallelism over 4")]
)
def test_experts_that_cannot_be_divided_are_refused(count: int, told: str) -> None:
    shape = ModelShape("SomeModel", 3, 9, 3, PLAN, count)
    with pytest.raises(ConfigError, match=told):
        check_model(Layout(dp_shard=4, ep=4), shape, "actor")
    check_model(Layout(dp_shard=4), shape, "actor")


def test_a_plan_with_an_unknown_style_is_refused() -> None:
    plan = {**PLAN, "layers.*.mlp.experts": "moe_tp_experts"}
    with pytest.raises(ConfigError, match="moe_tp_experts, which are not supported"):
        check_model(Layout(tp=2), ModelShape("Experts", 2, 4, 4, plan), "actor")


def test_the_table_names_the_rank_of_the_outputs() -> None:
    lines = Layout(pp=2, dp_shard=2).table().splitlines()
    assert [line.split() for line in lines[1:]] == [["0/2", "0", "2", "2"], ["1/2", "1", "3", "3"]]


def test_every_section_is_checked_before_a_run() -> None:
    words = [
        "trainer.backend=ray",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.tensor_model_parallel_size=3",
    ]
    words.append("critic.fsdp_config.fsdp_size=3")
    problems, _ = training_findings(load_config([*words, "algorithm.adv_estimator=gae"]).config)
    told = "\n".join(map(str, problems))
    assert "actor_rollout_ref.actor: got 4 processes" in told
    assert "critic.fsdp_config.fsdp_size: got 3" in told


def test_a_critic_that_a_run_has_not_is_not_checked() -> None:
    config = load_config(["trainer.backend=ray", "critic.ulysses_sequence_parallel_size=2"]).config
    problems, _ = training_findings(config)
    assert not [one for one in problems if one.where.startswith("critic")]
    assert [where for where, _, _ in arranged_roles(config, has_critic=False)] == [
        "actor_rollout_ref.actor"
    ]
    assert "critic" in [where for where, _, _ in arranged_roles(config, has_critic=True)]


def test_the_words_for_people() -> None:
    assert Layout().describe() == "one process"
    assert Layout(dp_shard=2, tp=2).describe() == "fsdp=2 tp=2 sp=1 pp=1"
    assert (
        Layout(dp_replicate=2, dp_shard=1, sp=2).describe()
        == "dp_replicate=2 fsdp=2 tp=1 sp=2 pp=1"
    )
