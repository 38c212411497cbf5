# SPDX-License-Identifier: Apache-2.0
"""Which role runs where: the three arrangements, arrangements of one's own, and what cannot be placed."""

import inspect
from typing import Any

import pytest

from quadriga.config import explain, load_config, place_roles, training_findings
from quadriga.config.placement import with_fewer_processes
from quadriga.config.trainer import RAY_INIT_KEYS
from quadriga.errors import ConfigError

RAY = "trainer.backend=ray"


def placed(*overrides: str, has_reference: bool = True, has_critic: bool = True):
    trainer = load_config([RAY, *overrides]).config.trainer
    return place_roles(trainer, has_reference=has_reference, has_critic=has_critic)


def findings(*overrides: str) -> tuple[dict[str, str], str]:
    problems, notices = training_findings(load_config(overrides).config)
    return {one.where: str(one) for one in problems if one.where.startswith("trainer.")}, "\n".join(
        notices
    )


@pytest.mark.parametrize(
    ("placement", "roles"),
    [
        ("together", {"actor_rollout_ref": "all", "critic": "all"}),
        ("grouped", {"actor_rollout": "policy", "ref": "scoring", "critic": "scoring"}),
        ("apart", {"actor_rollout": "actor_rollout", "ref": "ref", "critic": "critic"}),
        (
            "{actor_rollout: a, ref: b, critic: a}",
            {"actor_rollout": "a", "ref": "b", "critic": "a"},
        ),
        ("{actor_rollout_ref: a, critic: b}", {"actor_rollout_ref": "a", "critic": "b"}),
        (
            "{actor: a, rollout: b, ref: a, critic: a}",
            {"actor": "a", "rollout": "b", "ref": "a", "critic": "a"},
        ),
    ],
)
def test_roles_and_pools(placement: str, roles: dict[str, str]) -> None:
    found = placed(
        f"trainer.placement={placement}", "trainer.n_gpus_per_node=2", "trainer.nnodes=2"
    )
    assert found.roles == roles
    assert found.pools == {pool: [2, 2] for pool in roles.values()}


def test_a_role_that_the_run_has_not_needs_no_pool() -> None:
    found = placed("trainer.placement=grouped", has_reference=False, has_critic=False)
    assert (found.roles, found.pools) == ({"actor_rollout": "policy"}, {"policy": [1]})
    # Without a reference the policy is the same role wherever a reference would be.
    assert placed(has_reference=False).roles == {"actor_rollout": "all", "critic": "all"}


def test_pools_of_other_shapes() -> None:
    keys = ("trainer.placement.actor_rollout_ref=large", "trainer.placement.critic=small")
    found = placed(*keys, "trainer.resource_pools.small=[2, 1]", "trainer.n_gpus_per_node=4")
    assert found.pools == {"large": [4], "small": [2, 1]}
    assert sum(map(sum, found.pools.values())) == 7


def test_in_one_process_nothing_else_counts() -> None:
    config = load_config(["trainer.placement=apart", "trainer.resource_pools.ref=[3]"]).config
    assert place_roles(config.trainer, has_reference=True, has_critic=True).pools == {"all": [1]}


@pytest.mark.parametrize(
    ("placement", "pool"),
    [
        ("together", "all"),
        ("grouped", "scoring"),
        ("apart", "ROLE"),
        ("{actor_rollout_ref: a, critic: b, ROLE: c}", "c"),
    ],
)
@pytest.mark.parametrize(
    ("role", "section"), [("reward_model", "reward_model"), ("teacher", "distillation")]
)
def test_a_role_that_is_asked_for_has_a_pool(
    placement: str, pool: str, role: str, section: str
) -> None:
    placement, pool = placement.replace("ROLE", role), pool.replace("ROLE", role)
    trainer = load_config([RAY, f"trainer.placement={placement}"]).config.trainer
    has = {"has_reference": False, "has_critic": True}
    placed_roles = place_roles(trainer, **has, optional_roles=[role])
    assert placed_roles.roles[role] == pool and pool in placed_roles.pools
    assert role not in place_roles(trainer, **has).roles
    words = role.replace("_", " ")
    assert words not in explain(load_config([RAY, f"trainer.placement={placement}"]).config)
    enabled = load_config([RAY, f"trainer.placement={placement}", f"{section}.enable=True"]).config
    assert words in explain(enabled)


def test_a_reward_model_without_a_pool_is_refused() -> None:
    problems, _ = findings(
        RAY, "reward_model.enable=True", "trainer.placement={actor_rollout_ref: a, critic: b}"
    )
    assert "no pool for reward_model" in problems["trainer.placement"]
    assert "Add trainer.placement.reward_model=NAME" in problems["trainer.placement"]
    words = [
        "distillation.enable=True",
        "distillation.path=org/teacher",
        "trainer.placement={actor_rollout_ref: a}",
    ]
    problems, _ = findings(RAY, *words)
    assert "no pool for teacher, with distillation.enable=True" in problems["trainer.placement"]


@pytest.mark.parametrize(
    ("missing", "given"), [("critic", "{actor_rollout_ref: a}"), ("ref", "{actor_rollout: a}")]
)
def test_a_role_without_a_pool(missing: str, given: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no pool for {missing}.*Add trainer.placement.{missing}=NAME"
    ):
        placed(f"trainer.placement={given}", has_critic=missing == "critic")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([RAY, "trainer.device=cuda:1"], "trainer.device", "Ray gives each process a device of its own"),
        (["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=async", "trainer.device=cuda:1"],
         "trainer.device", "with vllm in processes of its own"),
        ([RAY, "trainer.placement={actor_rollout: a, reward: b}"], "trainer.placement", "the role reward"),
        ([RAY, "trainer.placement={actor_rollout_ref: a, ref: b}"], "trainer.placement", "a separate role"),
        ([RAY, "trainer.placement={critic: b}"], "trainer.placement", "no pool for the policy"),
        ([RAY, "trainer.placement={actor: a, ref: a}"], "trainer.placement", "or both of actor and rollout"),
        ([RAY, "trainer.placement={actor_rollout: a, rollout: b}"], "trainer.placement", "a role beside"),
        ([RAY, "trainer.placement={actor: a, actor_rollout: b}"], "trainer.placement", "or actor, rollout and ref"),
        ([RAY, "trainer.placement={actor: a, rollout: a}"], "trainer.placement", "placement.actor_rollout=a"),
        ([RAY, "trainer.placement=grouped", "trainer.resource_pools.ref=[1]"], "trainer.resource_pools.ref",
         "a pool without a role, expected pools out of policy, scoring"),
        (["trainer.n_gpus_per_node=8"], "trainer.n_gpus_per_node", "8, with trainer.backend=local, expected 1"),
        (["trainer.nnodes=2"], "trainer.nnodes", "set trainer.backend=ray"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed(overrides: list[str], key: str, said: str) -> None:
    problems, _ = findings(*overrides)
    assert list(problems) == [key]
    assert said in problems[key]


def test_a_rank_to_profile_that_does_not_exist_is_refused() -> None:
    """By the processes of its role's pool; reference and rollout have the actor's ranks."""
    profile = (
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        "critic.profiler.ranks=[0,4]",
    )

    def refused(*overrides: str) -> list[str]:
        problems, _ = training_findings(load_config([*profile, *overrides]).config)
        return [str(one) for one in problems if "profiler" in one.where]

    assert (
        "critic.profiler.ranks: got [4], expected ranks from 0 to 0: the role has 1 process."
        in refused()[0]
    )
    pools = (
        RAY,
        "trainer.placement=apart",
        "trainer.n_gpus_per_node=2",
        "trainer.resource_pools.critic=[4,1]",
    )
    ranks = "actor_rollout_ref.actor.profiler.ranks"
    assert refused(*pools, f"{ranks}=[1]") == []
    (one,) = refused(*pools, f"{ranks}=[1, 2, 3]")
    assert f"{ranks}: got [2, 3], expected ranks from 0 to 1: the role has 2 processes." in one


def test_what_is_read_on_ray_only() -> None:
    _, notices = findings("trainer.placement=apart", "ray_kwargs.ray_init.num_cpus=4")
    assert (
        "trainer.placement, ray_kwargs.ray_init: not used because trainer.backend is local."
        in notices
    )
    _, notices = findings(RAY, "trainer.placement=apart", "ray_kwargs.ray_init.num_cpus=4")
    assert "not used because trainer.backend" not in notices


def test_the_words() -> None:
    assert "all models in one process" in explain(load_config([]).config)
    keys = [RAY, "trainer.placement=grouped", "trainer.n_gpus_per_node=2", "trainer.nnodes=2"]
    text = explain(
        load_config(
            [*keys, "trainer.resource_pools.scoring=[1]", "trainer.max_worker_restarts=1"]
        ).config
    )
    assert (
        "pool policy: 4 processes on 2 machines (2 + 2), which share a machine's cores (2 to a machine)"
        in text
    )
    assert (
        "pool scoring: 1 process on one machine, with reference (if one is used) and critic" in text
    )
    assert "after the loss of a process or a node: up to 1 restart an hour" in text
    assert "a step that loses workers twice is skipped; up to 1 step in the run" in text
    assert "whose call takes over 7200 s" in text


@pytest.mark.parametrize(
    "override",
    ["trainer.placement=beside", "trainer.placement=7", "trainer.placement={ref: 1}", "trainer.resource_pools.a=[]",
     "trainer.resource_pools.a=[0]", "trainer.resource_pools=3", "trainer.max_worker_restarts=-1",
     "ray_kwargs.ray_init.num_cpu=3", "ray_kwargs.ray_init.log_to_driver=True"],
)  # fmt: skip
def test_values_that_do_not_fit(override: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        load_config([override])


def test_a_key_of_ray_that_is_null_is_as_good_as_left_out() -> None:
    config = load_config(
        ["ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.address=auto"]
    ).config
    assert config.ray_kwargs.ray_init == {"address": "auto"}


def test_rays_own_arguments() -> None:
    ray = pytest.importorskip("ray")
    hidden = {
        name
        for name in RAY_INIT_KEYS
        if name.startswith("_") or name == "object_spilling_directory"
    }
    assert RAY_INIT_KEYS - hidden <= set(inspect.signature(ray.init).parameters)
    assert hidden <= set(inspect.getdoc(ray.init).replace("`", " ").split())


def test_with_fewer_processes_only_what_divides_the_ranks() -> None:
    """A machine less first, then a process less; tp=2 leaves even numbers."""
    keys = [
        RAY,
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=3",
        "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    ]
    smaller = [one.trainer.resource_pools for one in with_fewer_processes(load_config(keys).config)]
    assert smaller == [{"all": [4, 4]}, {"all": [4]}, {"all": [2]}]


GROUPS = "actor_rollout_ref.rollout.tensor_model_parallel_size"
SGLANG = (RAY, "trainer.n_gpus_per_node=2", f"{GROUPS}=2", "actor_rollout_ref.rollout.name=sglang")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [RAY, "trainer.n_gpus_per_node=6", f"{GROUPS}=4"],
            "got 4: groups of 4 processes, but 6 generate",
        ),
        ([f"{GROUPS}=2"], "got 2: groups of 2 processes, but 1 generate"),
        ([*SGLANG, "trainer.device=cuda"], "Ray gives no devices"),
        (
            [RAY, "trainer.n_gpus_per_node=2", f"{GROUPS}=2", "actor_rollout_ref.rollout.name=hf"],
            "name=hf",
        ),
    ],
)
def test_groups_that_cannot_be_made(overrides: list[str], words: str) -> None:
    problems, _ = training_findings(load_config(overrides).config)
    assert [words in str(one) for one in problems if one.where == GROUPS] == [True]


def test_sglang_of_several_processes_is_for_cpus() -> None:
    """Whether a cluster has GPUs is not known here: it is said, and refused at the start there."""
    problems, notices = training_findings(load_config(SGLANG).config)
    assert not [one for one in problems if one.where == GROUPS]
    assert [
        one
        for one in notices
        if GROUPS in one and "on a machine with GPUs the run fails at its start" in one
    ]
    problems, notices = training_findings(load_config([*SGLANG, "trainer.device=cpu"]).config)
    assert not [one for one in (*problems, *notices) if GROUPS in str(one)]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "vllm", "tensor_model_parallel_size": 2}, "got 2, on a CPU"),
        (
            {"name": "vllm"},
            "got 2, with actor_rollout_ref.rollout.name=vllm and tensor_model_parallel_size=1",
        ),
        (
            {"name": "native", "tensor_model_parallel_size": 2},
            "rollout.name=native and tensor_model_parallel_size=2",
        ),
        (
            {"name": "sglang", "tensor_model_parallel_size": 2},
            "rollout.name=sglang and tensor_model_parallel_size=2",
        ),
    ],
)
def test_experts_of_a_rollout_are_divided_by_vllm_on_gpus(keys: dict[str, Any], words: str) -> None:
    at = "actor_rollout_ref.rollout"
    given = [
        RAY,
        "trainer.n_gpus_per_node=2",
        f"{at}.expert_parallel_size=2",
        *(f"{at}.{k}={v}" for k, v in keys.items()),
    ]
    problems, _ = training_findings(load_config([*given, "trainer.device=cpu"]).config)
    assert any(words in str(one) for one in problems if one.where == f"{at}.expert_parallel_size")
    problems, notices = training_findings(load_config([*given, "trainer.device=cuda"]).config)
    is_fine = "on a CPU" in words
    assert is_fine == (not any(one.where == f"{at}.expert_parallel_size" for one in problems))
    _, notices = training_findings(load_config(given).config)
    assert (keys["name"] == "vllm") == any(
        "on a machine without GPUs the run fails at its start" in one for one in notices
    )


@pytest.mark.parametrize("key", ["data_parallel_size=2", "request_seeds=False"])
def test_what_vllm_leaves_out_in_groups(key: str) -> None:
    """Each group is an engine, and its ranks draw alike."""
    rollout = [f"actor_rollout_ref.rollout.{one}" for one in ("name=vllm", "mode=async", key)]
    problems, _ = training_findings(
        load_config([RAY, "trainer.n_gpus_per_node=4", f"{GROUPS}=2", *rollout]).config
    )
    assert [one.where for one in problems if "with groups of 2 ranks" in str(one)] == [
        rollout[2].partition("=")[0]
    ]


def test_groups_are_explained() -> None:
    """And a start with fewer processes keeps to numbers that the groups divide."""
    config = load_config([RAY, "trainer.n_gpus_per_node=8", f"{GROUPS}=4"]).config
    assert "2 rollout groups of 4 neighbouring processes" in explain(config)
    assert [one.trainer.resource_pools for one in with_fewer_processes(config)] == [{"all": [4]}]


MEGATRON = "actor_rollout_ref.actor.strategy=megatron"


@pytest.mark.parametrize(
    ("words", "where", "said"),
    [
        (
            ["actor_rollout_ref.model.lora_rank=8"],
            "actor_rollout_ref.model.lora_rank",
            "trained by FSDP2",
        ),
        (
            ["actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2"],
            "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
            "with one pipeline stage",
        ),
        (
            ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.tensor_model_parallel_size=2"],
            "critic.tensor_model_parallel_size",
            "Megatron has one set of sizes",
        ),
        (
            ["actor_rollout_ref.actor.megatron.override_transformer_config.num_layers=3"],
            "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers",
            "one of account_for",
        ),
        (
            ["critic.model.enable_activation_offload=true"],
            "critic.model.enable_activation_offload",
            "strategy=megatron",
        ),
        (
            ["trainer.n_gpus_per_node=3", "critic.pipeline_model_parallel_size=2"],
            "critic",
            "a multiple of 2",
        ),
    ],
)
def test_what_keeps_megatron_from_training(
    words: list[str], where: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quadriga.config.placement.version", lambda name: "0.16.1")
    every = [RAY, "trainer.n_gpus_per_node=4", MEGATRON, "algorithm.adv_estimator=gae", *words]
    problems, _ = training_findings(load_config(every).config)
    assert said in "\n".join(str(one) for one in problems if one.where == where)


@pytest.mark.parametrize("found", ["0.19.2", "not installed"])
def test_megatron_of_another_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quadriga.config.placement.version", lambda name: found)
    problems, _ = training_findings(load_config([MEGATRON]).config)
    (told,) = [str(one) for one in problems if one.where == "actor_rollout_ref.actor.strategy"]
    assert found in told and "pip install -e '.[megatron]'" in told


def test_keys_that_another_engine_reads_are_named() -> None:
    key = "actor_rollout_ref.actor.megatron.sequence_parallel"
    _, notices = training_findings(load_config([f"{key}=false"]).config)
    assert f"{key}: not used because strategy is fsdp." in notices


def test_the_ranks_of_megatron() -> None:
    """Its distributed optimizer shards masters over the data-parallel ranks; without it they are replicas."""
    words = [
        RAY,
        "trainer.n_gpus_per_node=8",
        MEGATRON,
        "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    ]
    actor = load_config(words).config.actor_rollout_ref.actor
    layout = actor.layout(8, "actor", actor.megatron_if_chosen)
    assert (layout.fsdp, layout.dp_replicate, layout.tp, layout.is_whole) == (4, 1, 2, False)
    actor = load_config(
        [*words, "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false"]
    ).config
    actor = actor.actor_rollout_ref.actor
    layout = actor.layout(8, "actor", actor.megatron_if_chosen)
    assert (layout.fsdp, layout.dp_replicate) == (1, 4)
