# SPDX-License-Identifier: Apache-2.0
"""verl's command lines: Hydra's words, verl's defaults, and what becomes of each key."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from quadriga.config.keys import leaf_of
from quadriga.errors import ConfigError
from quadriga.rewards.registry import BUILT_IN
from quadriga_verl.cli import main, version_of
from quadriga_verl.commands.entries import find_entry
from quadriga_verl.commands.hydra import MISSING, VERSIONS, parse_word, verl_defaults
from quadriga_verl.commands.meaning import ESTIMATORS, LOSSES, MANAGERS
from quadriga_verl.commands.translate import Line, translate

PUBLISHED = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_name("published_keys.tsv").read_text().splitlines()
    if not line.startswith("#")
]
RC, LOSS = "algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.loss_mode"
VLLM = "actor_rollout_ref.rollout.name=vllm"


def translated(*words: str, program: str = "main_ppo", version: str = VERSIONS[-1]) -> Line:
    return translate(find_entry(program), [*words], version)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-6", 1e-6),
        ("-1", -1),
        (".5", 0.5),
        ("-1.", -1.0),
        ("e5", "e5"),
        ("1__0", "1__0"),
        ("True", True),
        ("NULL", None),
        ("yes", "yes"),
        ("", ""),
        ("'3'", "3"),
        ("[console,wandb]", ["console", "wandb"]),
        ("[\"a b\", 'c', 1.0, []]", ["a b", "c", 1.0, []]),
        ("{a:1, b: {c:[x,y]}}", {"a": 1, "b": {"c": ["x", "y"]}}),
        ("{a=b: 1, ${c}: 2}", {"a=b": 1, "${c}": 2}),
        ("/data/a=b.parquet", "/data/a=b.parquet"),
        ("a\\,b", "a,b"),
    ],
)
def test_values_are_read_by_hydras_rules(text: str, value: object) -> None:
    read = parse_word(f"++a.b={text}").value
    assert read == value
    assert type(read) is type(value)


def test_verls_defaults_hold_where_nothing_is_said() -> None:
    config = translated(VLLM, "trainer.n_gpus_per_node=1").config
    assert config is not None
    assert (config.algorithm.adv_estimator, config.trainer.total_epochs) == ("gae", 30)
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert config.trainer.backend == "local"


def test_grpo_with_one_response_is_verls_own_affair() -> None:
    found = translated(VLLM, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1")
    assert found.refused == []
    assert found.config is not None and found.config.actor_rollout_ref.rollout.n == 1


def test_several_processes_mean_ray() -> None:
    config = translated(VLLM).config
    assert config is not None
    assert (config.trainer.n_gpus_per_node, config.trainer.backend) == (8, "ray")


@pytest.mark.parametrize("tree", ["ppo", "ppo_megatron"])
@pytest.mark.parametrize("version", VERSIONS)
def test_each_default_is_taken_without_a_notice(version: str, tree: str) -> None:
    words = [
        f"{key}={json.dumps(value)}"
        for key, value in verl_defaults(tree, version).items()
        if value != MISSING
    ]
    found = translated(VLLM, f"--config-name={tree}_trainer", *words, version=version)
    assert not found.refused
    assert not found.notices


@pytest.mark.parametrize(("key", "value"), PUBLISHED, ids=[key for key, _ in PUBLISHED])
def test_a_published_key_is_known(key: str, value: str) -> None:
    found = translated(f"{key}={value}")
    assert leaf_of(key) is not None or not any("neither verl" in str(one) for one in found.refused)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["actor_rollout_ref.actor.clip_ratio_c=10"], {"actor_rollout_ref.actor.clip_ratio_c": 10}),
        # verl reads clip_ratio only where a side is null.
        (["actor_rollout_ref.actor.clip_ratio=0.4"], {"actor_rollout_ref.actor.clip_ratio_high": 0.2}),
        (
            ["actor_rollout_ref.actor.clip_ratio=0.4", "actor_rollout_ref.actor.clip_ratio_low=null"],
            {"actor_rollout_ref.actor.clip_ratio_low": 0.4, "actor_rollout_ref.actor.clip_ratio_high": 0.2},
        ),
        (["actor_rollout_ref.actor.ppo_micro_batch_size=64"],
         {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8}),
        (["actor_rollout_ref.actor.ppo_micro_batch_size=64",
          "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"],
         {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32}),
        (["actor_rollout_ref.actor.optim.lr_warmup_steps=null"], {"actor_rollout_ref.actor.optim.lr_warmup_steps": -1}),
        (["actor_rollout_ref.actor.optim.lr_warmup_steps=0"], {"actor_rollout_ref.actor.optim.lr_warmup_steps": -1}),
        (["actor_rollout_ref.actor.optim.warmup_style=cosine"],
         {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}),
        # verl counts the steps of a schedule from 0, of a cosine unless it says otherwise.
        (["actor_rollout_ref.actor.optim.warmup_style=cosine", "actor_rollout_ref.actor.optim.zero_indexed_step=False"],
         {"actor_rollout_ref.actor.optim.zero_indexed_step": False}),
        (["actor_rollout_ref.actor.optim.zero_indexed_step=False"],
         {"actor_rollout_ref.actor.optim.zero_indexed_step": True, "critic.optim.zero_indexed_step": True}),
        # do_sample is read in synchronous generation alone.
        (["actor_rollout_ref.rollout.val_kwargs.temperature=0.6"],
         {"actor_rollout_ref.rollout.val_kwargs.do_sample": True}),
        (["actor_rollout_ref.rollout.val_kwargs.temperature=0.6", "actor_rollout_ref.rollout.mode=sync"],
         {"actor_rollout_ref.rollout.val_kwargs.do_sample": False}),
        (["trainer.test_freq=False"], {"trainer.test_freq": -1}),
        # A number in quotes, or as YAML leaves it without a point.
        (["actor_rollout_ref.actor.optim.lr='1e-5'"], {"actor_rollout_ref.actor.optim.lr": 1e-5}),
        # Of trained over rollout probabilities there, of rollout over trained ones here; a veto beside it, or alone.
        (
            [f"{RC}.rollout_rs=token", f"{RC}.rollout_rs_threshold=4", f"{RC}.rollout_rs_threshold_lower=0.8"],
            {f"{RC}.rollout_rs": "token_k1", f"{RC}.rollout_rs_threshold": "0.25_1.25"},
        ),
        (
            [f"{RC}.rollout_rs=geometric", f"{RC}.rollout_rs_threshold=2", f"{RC}.rollout_token_veto_threshold=1e-4"],
            {f"{RC}.rollout_rs": "seq_mean_k1,seq_max_k1", f"{RC}.rollout_rs_threshold": "0.5_2,3e-09_10000.0"},
        ),
        (
            [f"{RC}.rollout_token_veto_threshold=0.5"],
            {f"{RC}.rollout_rs": "seq_max_k1", f"{RC}.rollout_rs_threshold": "3e-09_2.0"},
        ),
        # Null, where there are no importance weights to bound: the default of ours, which nothing reads.
        ([f"{RC}.rollout_is=null", f"{RC}.rollout_is_threshold=null"], {f"{RC}.rollout_is_threshold": None}),
        (
            ["actor_rollout_ref.rollout.agent.agent_loop_config_path=/a/agent.yaml"],
            {"actor_rollout_ref.rollout.agent.agent_loop_path": "/a/agent.yaml"},
        ),
        (["transfer_queue.enable=True"], {}),
        (["data.custom_cls.path=a.py", "data.custom_cls.name=A", "+data.tone=2"], {"data.custom_cls.options.tone": 2}),
        (["trainer.total_training_steps=5"], {"trainer.total_training_steps": 5, "trainer.total_epochs": 30}),
        (["trainer.total_training_steps=5", "actor_rollout_ref.actor.optim.warmup_style=cosine"],
         {"actor_rollout_ref.actor.optim.total_training_steps": 5}),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"],
         {"actor_rollout_ref.actor.optim.master_dtype": "bfloat16"}),
        ([f"{LOSS}=geo_mean"], {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}),
        ([f"{LOSS}=gspo"], {"actor_rollout_ref.actor.loss_agg_mode": "token-mean"}),
        (["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"],
         {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}),
        (["trainer.max_actor_ckpt_to_keep=2"], {"trainer.max_ckpt_to_keep": 2}),
        (["trainer.logger=[console,file,trackio]"], {"trainer.logger": ["console", "jsonl"]}),
        (["skip.rollout.enable=True"], {"actor_rollout_ref.rollout.skip.enable": True}),
        (["trainer.device=npu"], {"trainer.device": "auto"}),
        (["data.gen_batch_size=96"], {"data.train_batch_size": 96}),
        (["critic.fsdp.fsdp_size=4"], {"critic.fsdp_config.fsdp_size": 4}),
        (["actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor_rollout_ref.rollout.dtype=float16"],
         {"actor_rollout_ref.actor.fsdp_config.model_dtype": "float16"}),
        (["+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32"],
         {"actor_rollout_ref.actor.fsdp_config.model_dtype": "float32"}),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1"],
         {"actor_rollout_ref.actor.policy_loss.options.ppo_kl_coef": 1}),
        (["reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
          "+reward.reward_kwargs.overlong_buffer_cfg.len=128"],
         {"reward_model.reward_kwargs.overlong_buffer_cfg.len": 128, "reward_model.reward_kwargs.max_resp_len": 512}),
        (["model_engine=veomni", "actor_rollout_ref.actor.veomni.ulysses_parallel_size=2"],
         {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}),
        # 8 processes: 2 that shard a copy would be fewer than the 4 that share a sequence.
        (["model_engine=veomni", "actor_rollout_ref.actor.veomni.ulysses_parallel_size=4",
          "actor_rollout_ref.actor.veomni.fsdp_size=2"], {"actor_rollout_ref.actor.fsdp_config.fsdp_size": 4}),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=8"], {"actor_rollout_ref.actor.fsdp_config.fsdp_size": -1}),
        (["actor_rollout_ref.rollout.nnodes=2"], {"trainer.nnodes": 1}),
        # Ranks of one engine there, engines of one rank here.
        (["actor_rollout_ref.rollout.data_parallel_size=4"], {"actor_rollout_ref.rollout.data_parallel_size": None}),
        # verl divides experts among the ranks of several engines, too.
        *(([f"actor_rollout_ref.rollout.{name}" for name in (*engine, "expert_parallel_size=8")],
           {"actor_rollout_ref.rollout.expert_parallel_size": size}) for engine, size in (
            (["tensor_model_parallel_size=2", "data_parallel_size=4"], 2), (["tensor_model_parallel_size=8"], 8),
            (["name=sglang", "tensor_model_parallel_size=8"], 1))),
        (["+actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.merge=True",
          "actor_rollout_ref.model.lora.target_modules=[linear_qkv]"],
         {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_merge": True,
          "actor_rollout_ref.model.target_modules": ["q_proj", "k_proj", "v_proj"]}),
        (["actor_rollout_ref.model.lora_alpha=0"], {"actor_rollout_ref.model.lora_alpha": None}),
        (["custom_reward_function.name=null"], {"custom_reward_function.name": "compute_score"}),
        (["trainer.save_freq=after_each_epoch"], {"trainer.save_freq": "after_each_epoch"}),
        (["global_profiler.tool=npu", "global_profiler.steps=[1]"], {"global_profiler.steps": None}),
        (["global_profiler.tool=nsys", "global_profiler.steps=[2]", "actor_rollout_ref.actor.profiler.enable=True",
          "actor_rollout_ref.actor.profiler.ranks=[0,4]", "algorithm.adv_estimator=gae"],
         {"global_profiler.tool": "nsys", "global_profiler.steps": [2],
          "actor_rollout_ref.actor.profiler.ranks": [0, 4], "critic.profiler.ranks": []}),
        (["global_profiler.tool=torch", "actor_rollout_ref.actor.profiler.enable=True",
          "actor_rollout_ref.actor.profiler.all_ranks=True"], {"actor_rollout_ref.actor.profiler.ranks": None}),
        (["actor_rollout_ref.actor.profiler.ranks=[0,4]"], {"actor_rollout_ref.actor.profiler.ranks": None}),
        (["actor_rollout_ref.rollout.name=trtllm"], {"actor_rollout_ref.rollout.name": "vllm"}),
        (["algorithm.kl_ctrl.kl_coef=${algorithm.gamma}"], {"algorithm.kl_ctrl.kl_coef": 1.0}),
    ],
)  # fmt: skip
def test_what_values_become(words: list[str], ours: dict[str, object]) -> None:
    found = translated(VLLM, *words)
    assert not found.refused
    assert {key: found.settings.get(key) for key in ours} == ours


def test_dynamic_sampling_is_the_recipes() -> None:
    words = [
        "actor_rollout_ref.rollout.n=8",
        "algorithm.filter_groups.enable=True",
        "data.train_batch_size=32",
        "data.gen_batch_size=96",
    ]
    dapo = translated(VLLM, *words, program="recipe.dapo.main_dapo").config
    assert dapo is not None
    assert (dapo.data.train_batch_size, dapo.data.gen_batch_size) == (32, 96)
    assert dapo.algorithm.filter_groups.enable
    plain = translated(VLLM, *words, version="0.6.1")
    assert plain.config is not None
    assert not plain.config.algorithm.filter_groups.enable
    assert any("does not filter groups" in one for one in plain.notices)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.train_batch_size=", "unset"),
        ("data.train_files=$HOME/a.parquet", "a variable of a shell"),
        ("data.train_files=${TRAIN}", "a key that there is"),
        ("+actor_rollout_ref.ref.model.path=m", "training starts from"),
        ("trainer.seed=1,2", "a sweep"),
        (
            "algorithm.gamma=${algorithm.lam} algorithm.lam=${algorithm.gamma}",
            "circular references",
        ),
        ("trainer.no_such=1", "neither verl nor Quadriga"),
        ("trainer=5", "trainer: got 5, for a section"),
        ("algorithm.adv_estimator=spo", "one of"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gvpo", "one of"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float8", "bfloat16, float16 or float32"),
        ("actor_rollout_ref.rollout.dtype=float16", "float16 for training too"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp16", "fp32 or bf16"),
        (f"{RC}.rollout_token_veto_threshold=0", "a number above 3e-09"),
        (f"{RC}.rollout_is=token {RC}.rollout_is_threshold=null", "got null, expected a number"),
        (f"{RC}.rollout_token_veto_threshold=0.1 {RC}.rollout_rs=token_k1", "a number above 3e-09"),
        (
            "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3",
            "as an argument of the loop",
        ),
        ("~trainer.no_such", "a key that there is"),
        (
            "actor_rollout_ref.actor.optim.override_optimizer_config.decoupled_weight_decay=False",
            "expected true",
        ),
        ("distillation.enabled=True", "distillation.path"),
        (
            "distillation.enabled=True distillation.teacher_key=kind",
            "the name in data.reward_fn_key",
        ),
        ("critic.model.lora_rank=8 algorithm.adv_estimator=gae", "All weights of the critic"),
        ("trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=2", "one value"),
        ("trainer.total_epochs=many", "a whole number"),
        (
            "trainer.n_gpus_per_node=many actor_rollout_ref.actor.ppo_micro_batch_size=8",
            "a whole number",
        ),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=ten", "a number"),
        (
            "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora.alpha=0",
            "got 0, expected a whole number, at least 1",
        ),
    ],
)
def test_what_cannot_be_taken_is_said(word: str, said: str) -> None:
    found = translated(VLLM, *word.split(" "))
    assert found.config is None
    assert any(said in str(one) for one in found.refused), found.refused


@pytest.mark.parametrize(
    ("version", "words", "redundant_key"),
    [
        (
            "0.10.0",
            "custom_reward_function.name=score reward.custom_reward_function.name=null",
            "reward.custom_reward_function.name",
        ),
        (
            "0.6.1",
            "global_profiler.tool=nsys reward_model.profiler.all_ranks=True reward_model.profiler.ranks=[0]",
            "reward_model.profiler.ranks",
        ),
        (
            "0.10.0",
            "actor_rollout_ref.actor.megatron.dtype=float16 actor_rollout_ref.rollout.dtype=float16",
            "actor_rollout_ref.rollout.dtype",
        ),
    ],
)
def test_a_key_that_another_one_overrides_is_reported(
    version: str, words: str, redundant_key: str
) -> None:
    line = translated(VLLM, *words.split(" "), version=version)
    assert line.config is not None, line.refused
    expected = f"{redundant_key}: It changes nothing beside the other keys of this command line."
    assert [notice for notice in line.notices if "It changes nothing" in notice] == [expected]


@pytest.mark.parametrize(
    ("program", "word"),
    [
        ("main_ppo", "actor_rollout_ref.actor.optim.lr_warmup_steps=[1,2]"),
        ("main_ppo", "actor_rollout_ref.actor.policy_loss.loss_mode=[1,2]"),
        ("main_ppo", "actor_rollout_ref.actor.strategy=[1,2]"),
        ("main_ppo", "actor_rollout_ref.actor.fsdp_config.model_dtype=[1,2]"),
        ("main_generation", "rollout.log_prob_micro_batch_size=abc"),
        ("fsdp_sft_trainer", "data.prompt_key=[1,2]"),
        ("sft_trainer", "trainer.logger=true"),
        ("sft_trainer", "engine.strategy=[1,2]"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(program: str, word: str) -> None:
    found = translated(word, "data.nonsense=1", program=program)
    key = word.partition("=")[0]
    assert any(str(one).startswith(f"{key}: got ") for one in found.refused), found.refused
    assert any(str(one).startswith("data.nonsense: ") for one in found.refused)


def test_sweeps_and_programs_and_versions_that_nobody_knows_are_told_with_the_rest(
    capsys, tmp_path: Path
) -> None:
    words = ["-m", "trainer.no_such=1", VLLM]
    lines = [
        {"entry": "recipe.none.main_none", "args": words},
        {"entry": "main_ppo", "args": words, "set": "7.1"},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join([*map(json.dumps, lines), "[]", "{"]))
    assert main(["--check-file", str(file)]) == 2
    *results, last = capsys.readouterr().out.splitlines()
    said = [
        [sentence.partition(":")[0] for sentence in json.loads(one)["refused"]] for one in results
    ]
    rest = ["-m", "trainer.no_such"]
    where = [f"{file}, line {number}" for number in (3, 4)]
    assert said == [["verl's program", *rest], ["--verl", *rest], where[:1], where[1:]]
    assert last == "accepted 0 of 4"
    with pytest.raises(ConfigError, match="--check-file: got '/nowhere': No such file"):
        main(["--check-file", "/nowhere"])
    assert main(["--check", "main_none", *words]) == 2
    assert "expected a known program of verl" in capsys.readouterr().err
    assert [version_of(one) for one in ("", "0.6", "verl-0.8.0.dev (2026-01)", "verl-recipe (2026-08)")] == [
        "0.10.0", "0.6.1", "0.8.0", "0.10.0",
    ]  # fmt: skip


def test_a_users_file_with_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 77}\n"
    )
    found = translated(
        VLLM, f"--config-path={tmp_path}", "--config-name=mine", "data.max_response_length=5"
    )
    assert found.config is not None
    assert (found.config.data.max_prompt_length, found.config.data.max_response_length) == (77, 5)
    assert found.config.trainer.total_epochs == 30
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "runs" / "mine.yaml")
    nested = translated(VLLM, f"--config-path={tmp_path}", "--config-name=runs/mine.yaml")
    assert nested.config is not None
    assert nested.config.data.max_prompt_length == 77
    gone = translated(VLLM, "--config-path=/nowhere", "--config-name=gone")
    assert gone.config is not None
    assert "gone.yaml" in str(gone.machine[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{LOSS}=sapo", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], "averages over responses"),
        ([f"{LOSS}=geo_mean", f"{RC}.rollout_is=token"], "geometric mean"),
        ([f"{LOSS}=kl_cov"], "within a micro-batch"),
        ([f"{LOSS}=dro"], "dro_beta is 0.1"),
        (["algorithm.adv_estimator=gpg"], "a score other than 0"),
        (["algorithm.adv_estimator=optimal_token_baseline", f"{RC}.rollout_rs=token_k1",
          f"{RC}.rollout_rs_threshold=2"], "rejected token"),
        (["actor_rollout_ref.rollout.val_kwargs.n=4"], "1000 draws"),
        (["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"], "2 processes"),
        (["transfer_queue.enable=True"], "how they travel"),
        (["actor_rollout_ref.actor.loss_mode=kl_cov"], "under actor_rollout_ref.actor.policy_loss alone"),
        (["actor_rollout_ref.actor.checkpoint.strict=False"], "read whole or not at all"),
        (["algorithm.adv_estimator=grpo", "critic.optim.lr_warmup_steps=3"], "No critic is trained"),
        (["algorithm.adv_estimator=grpo", "critic.fsdp.model_dtype=bf16"], "No critic is trained"),
    ],
)  # fmt: skip
def test_numbers_that_differ_are_told(words: list[str], said: str) -> None:
    found = translated(VLLM, *words)
    assert found.refused == []
    assert any(said in one for one in found.notices), found.notices
    assert not any(
        said in one for one in translated(VLLM, f"{LOSS}=vanilla", f"{RC}.rollout_is=token").notices
    )


def test_what_losses_are_averaged_over_up_to_08() -> None:
    summed = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    for version, mode in zip(VERSIONS, (*["seq-mean-token-mean"] * 3, "token-mean"), strict=True):
        assert (
            translated(VLLM, f"{LOSS}=gspo", version=version).settings[
                "actor_rollout_ref.actor.loss_agg_mode"
            ]
            == mode
        )
        is_told = any(
            "adds them up" in one for one in translated(VLLM, summed, version=version).notices
        )
        assert is_told == (version != VERSIONS[-1])


def test_a_critics_key_without_a_critic_is_told() -> None:
    found = translated(VLLM, "algorithm.adv_estimator=grpo", "critic.optim.lr=3e-5")
    assert any("critic.optim.lr" in one and "No critic" in one for one in found.notices)


def test_the_tables_of_names_are_those_of_the_registries() -> None:
    assert frozenset(ADVANTAGES) == ESTIMATORS
    assert set(POLICY_LOSSES) == set(LOSSES)
    assert set(MANAGERS) < set(BUILT_IN)


def test_a_file_of_lines_is_answered_line_by_line(capsys, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines = [{"id": 7, "entry": "verl.trainer.main_ppo", "args": [VLLM], "set": "verl-0.6.1"},
             {"id": 8, "entry": "nothing", "args": []}]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["--check-file", str(file)]) == 2
    *results, last = capsys.readouterr().out.splitlines()
    assert last == "accepted 1 of 2"
    assert [(one["id"], one["accepted"]) for one in map(json.loads, results)] == [
        (7, True),
        (8, False),
    ]


def test_a_check_loads_no_torch() -> None:
    run = "runpy.run_module('quadriga', run_name='__main__')"
    start = "import runpy, sys\nsys.argv[1:] = ['verl', 'main_ppo', '--check']"
    program = f"{start}\ntry:\n    {run}\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "total_epochs: 30" in done.stdout


@pytest.mark.parametrize(
    ("mode", "ours"), [("disabled", "off"), ("R2", "old_log_prob"), ("R3", "rollout")]
)
@pytest.mark.parametrize("engine", ["", "megatron", "veomni"])
def test_the_replay_of_routers(mode: str, ours: str, engine: str) -> None:
    section = f"actor_rollout_ref.actor.{engine}.router_replay".replace("..", ".")
    words = [
        f"{section}.mode={mode}",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    ]
    words += [f"model_engine={engine}"] if engine else []
    line = translated(*words, "actor_rollout_ref.rollout.name=native")
    assert line.config is not None and line.config.actor_rollout_ref.actor.router_replay == ours
    replaced = translated(*words, VLLM)
    assert not replaced.refused
    assert replaced.settings["actor_rollout_ref.rollout.name"] == (
        "native" if mode == "R3" else "vllm"
    )
    assert any("which router_replay repeats" in notice for notice in replaced.notices) == (
        mode == "R3"
    )
    assert [one.where for one in translated(f"{section}.mode=record", *words[1:]).refused] == [
        f"{section}.mode"
    ]


def test_lines_of_random_words_are_accepted() -> None:
    """100 lines of words of published scripts: no traceback, and no word without effect or notice."""
    check = Path(__file__).parents[3] / "benchmarks" / "verl_lines.py"
    command = [sys.executable, str(check), "--lines", "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelled_key_is_refused_with_the_nearest_one() -> None:
    (refused,) = translated("data.train_batch_sise=8").refused
    assert "Did you mean data.train_batch_size" in str(refused)
    # Hydra takes a new key with a plus sign, and verl does not read it.
    line = translated("+data.train_batch_sise=8")
    assert not line.refused
    assert "Did you mean data.train_batch_size" in line.notices[-1]


def test_a_reward_model_takes_the_place_of_a_function() -> None:
    line = translated(
        VLLM,
        "reward_model.enable=True",
        "reward_model.model.path=m",
        "custom_reward_function.path=score.py",
        version="0.6.1",
    )
    assert not line.refused
    assert line.config is not None and line.config.custom_reward_function.path is None
    assert any("The function is not called" in notice for notice in line.notices)


def test_steps_of_the_separate_trainer_are_updates() -> None:
    section = "trainer.v1"
    line = translated(
        VLLM,
        f"{section}.trainer_mode=separate_async",
        f"{section}.separate_async.parameter_sync_step=3",
        f"{section}.sampler.max_off_policy_threshold=2",
        "trainer.total_training_steps=10",
        "trainer.test_freq=5",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
    )
    assert not line.refused
    assert (
        line.settings.items()
        >= {
            "async_training.enable": True,
            "async_training.sync_every": 3,
            "async_training.max_staleness": 2,
            "trainer.total_training_steps": 30,
            "trainer.test_freq": 15,
            "trainer.resource_pools": {"generation": [4]},
        }.items()
    )
    assert any("verl counts 3 updates as one step" in notice for notice in line.notices)
