# SPDX-License-Identifier: Apache-2.0
"""From files and command line to a configuration, one override at a time and as a whole."""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config import Config, leaf_keys, load_config, show
from quadriga.config.loader import parse_override
from quadriga.errors import ConfigError

FILES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
# Those that begin with sft are of another task: test_tasks.py.
CONFIGS = [file for file in FILES if not file.name.startswith("sft")]


def error_of(
    *overrides: str, files: tuple[Path, ...] = (), for_training: bool = False
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, files, for_training=for_training)
    return caught.value


def test_without_anything_every_key_has_its_default() -> None:
    assert load_config().config == Config()
    assert load_config().notices == []


def test_files_go_over_each_other_and_overrides_over_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("data:\n  seed: 1\n  train_batch_size: 8\n  max_prompt_length: 64\n")
    second.write_text("data:\n  seed: 2\n  train_batch_size: 16\n")
    data = load_config(["data.seed=3"], [first, second]).config.data
    assert (data.max_prompt_length, data.train_batch_size, data.seed) == (64, 16, 3)


def test_open_dictionaries_merge(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  apply_chat_template_kwargs: {enable_thinking: true, style: {tone: calm}}\n"
    )
    added = [
        "data.apply_chat_template_kwargs.enable_thinking=False",
        "+data.apply_chat_template_kwargs.style.size=2",
    ]
    kwargs = load_config(added, [file]).config.data.apply_chat_template_kwargs
    assert kwargs == {"enable_thinking": False, "style": {"tone": "calm", "size": 2}}


def test_a_file_is_not_changed_by_what_comes_after_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("reward_model:\n  reward_kwargs: {a: {b: 1}}\n")
    load_config(["reward_model.reward_kwargs.a.b=2"], [file])
    assert load_config([], [file]).config.reward_model.reward_kwargs == {"a": {"b": 1}}


def test_an_empty_section_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\ntrainer: {}\n")
    assert load_config([], [file]).config == Config()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.actor.n", "actor_rollout_ref.rollout.n"),
        ("trainer.seeds", "trainer.seed"),
        ("trainer.n_gpu", "trainer.n_gpus_per_node"),
    ],
)
def test_an_unknown_key_brings_the_nearest(typed: str, meant: str) -> None:
    assert meant in error_of(f"{typed}=1").fix


def test_a_key_like_no_other_brings_the_list() -> None:
    assert "quadriga config keys" in error_of("zebra.stripes=1").fix


def test_every_error_comes_at_once_with_its_key() -> None:
    error = error_of(
        "data.seeed=1", "data.seed=x", "data.shuffle=yes", "trainer.save_freq=0", "nonsense"
    )
    text = str(error)
    assert text.startswith("5 things in the configuration are wrong:")
    for key in (
        "data.seeed: got",
        "data.seed: got 'x'",
        "data.shuffle: got 'yes'",
        "trainer.save_freq: got 0",
        "'nonsense'",
    ):
        assert key in text
    assert not text.endswith("..")
    assert str(error_of("data.shufle=1", "data.seeed=1")).endswith("Did you mean data.seed?")


def test_one_error_is_in_the_house_form() -> None:
    error = error_of("data.max_prompt_length=0")
    assert str(error) == "data.max_prompt_length: got 0, expected a whole number, at least 1."


def test_an_error_survives_pickling() -> None:
    error = error_of("data.seed=x", "data.shuffle=yes")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_checks_between_keys_come_with_the_errors_of_single_keys() -> None:
    text = str(
        error_of(
            "data.max_prompt_length=0", "actor_rollout_ref.rollout.temperature=0", for_training=True
        )
    )
    assert "data.max_prompt_length: got 0" in text
    assert "actor_rollout_ref.rollout.temperature: got 0" in text
    assert "actor_rollout_ref.model.path: got nothing" in text


def test_a_wrong_key_is_not_said_to_be_missing_too() -> None:
    text = str(
        error_of("data.train_files=${HOME}/x.parquet", "data.val_files=[1]", for_training=True)
    )
    assert text.count("data.train_files: ") == 1
    assert text.count("data.val_files: ") == 1


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.seed=1.5", "a whole number"),
        ("data.seed=True", "a whole number"),
        ("data.shuffle=1", "true or false"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "a number"),
        ("actor_rollout_ref.actor.optim.lr=-1", "at least 0"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "a list of 2"),
        ("actor_rollout_ref.actor.optim.betas=[0.9, 1.0]", "below 1"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "seq-mean-token-sum-norm"),
        ("actor_rollout_ref.actor.clip_ratio_c=1.0", "above 1"),
        ("actor_rollout_ref.rollout.top_p=0", "above 0"),
        ("actor_rollout_ref.rollout.top_k=0", "-1 or"),
        ("actor_rollout_ref.rollout.stop=['']", "not empty"),
        ("actor_rollout_ref.rollout.name=trtllm", "one of native"),
        ("actor_rollout_ref.actor.strategy=veomni", "one of fsdp, fsdp2, megatron"),
        ("trainer.logger=[consle]", "console"),
        ("trainer.default_local_dir=out/{run}", "{experiment_name}"),
        ("trainer.experiment_name=../run", "without '..'"),
        ("trainer.experiment_name=team/../../run", "without '..'"),
        ("trainer.project_name=/run", "does not begin with '/'"),
        ('trainer.project_name="a\\nb"', "line end"),
        ("reward_model.max_error_rate=2", "at most 1"),
        ("data=3", "a section"),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, reason: str) -> None:
    error = error_of(override)
    assert error.where == override.split("=")[0]
    assert reason in error.expected


@pytest.mark.parametrize("name", ["team/exp1", "v1..2", "..."])
def test_a_name_may_have_folders_and_dots(name: str) -> None:
    assert load_config([f"trainer.experiment_name={name}"]).config.trainer.experiment_name == name


def test_none_in_python_is_null_in_yaml() -> None:
    assert error_of("data.val_batch_size=None").fix == "Write null."
    assert error_of("data.seed=None").fix == ""


def test_only_the_key_that_was_written_is_named() -> None:
    assert (
        error_of("actor_rollout_ref.actor.clip_ratio=-1").where
        == "actor_rollout_ref.actor.clip_ratio"
    )


def test_a_key_given_twice_the_last_holds_and_it_is_said() -> None:
    loaded = load_config(["data.seed=3", "data.shuffle=False", "++data.seed=4"])
    assert loaded.config.data.seed == 4
    assert loaded.notices == [
        "data.seed is set twice on the command line; the last value is used: 4."
    ]


def test_an_error_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  seed: 1\n  shuffle: maybe\n  sed: 3\ntrainer:\n  experiment_name: 42\n"
    )
    text = str(error_of(files=(file,)))
    assert f"data.shuffle ({file}, line 3): got 'maybe'" in text
    assert f"data.sed ({file}, line 4): got a key that does not exist" in text
    assert (
        f"trainer.experiment_name ({file}, line 6): got 42, expected text, not empty. Put text"
        in text
    )


def test_an_override_hides_the_place_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  seed: 1\n")
    assert error_of("data.seed=x", files=(file,)).where == "data.seed"


def test_what_is_shown_can_be_read_again(tmp_path: Path) -> None:
    wanted = [
        "trainer.experiment_name=0123",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "data.train_files=[a.parquet, b.parquet]",
    ]
    wanted += [
        "data.apply_chat_template_kwargs.when='2026-01-31'",
        "actor_rollout_ref.actor.clip_ratio=0.1",
    ]
    config = load_config(wanted).config
    file = tmp_path / "resolved.yaml"
    file.write_text(show(config))
    again = load_config([], [file])
    assert again.config == config
    assert again.notices == []
    assert config.trainer.experiment_name == "0123"
    assert config.data.apply_chat_template_kwargs == {"when": "2026-01-31"}


@given(
    text=st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1).filter(
        lambda t: "${" not in t
    ),
    number=st.floats(0, 1e6, allow_nan=False),
    count=st.integers(1, 10**6),
    flag=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_any_value_makes_the_round_trip(text: str, number: float, count: int, flag: bool) -> None:
    config = Config.model_validate(
        {
            "trainer": {
                "experiment_name": f"run {text}".replace("..", "."),
                "seed": count,
                "val_only": flag,
            },
            "actor_rollout_ref": {"actor": {"optim": {"lr": number}}},
            "reward_model": {"reward_kwargs": {"text": text, "list": [text, number, flag, None]}},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "resolved.yaml"
        file.write_text(show(config), encoding="utf-8")
        assert load_config([], [file]).config == config


@pytest.mark.parametrize("file", CONFIGS, ids=[file.name for file in CONFIGS])
def test_every_configuration_of_the_repository_is_valid(file: Path) -> None:
    loaded = load_config([], [file])
    assert loaded.notices == []
    assert loaded.config != Config()


def test_the_repository_has_configurations() -> None:
    assert {"quickstart.yaml", "grpo.yaml"} <= {file.name for file in CONFIGS}


def test_importing_the_configuration_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; import quadriga.config as c; c.load_config(['data.seed=3']); c.explain(c.Config());"
        "print([m for m in ('torch', 'ray', 'transformers', 'datasets', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_data_set_of_ones_own_has_keys_of_its_own() -> None:
    """`+data.NAME` is one, where there is such a class; without one, it may be a mistake."""
    own = ["data.custom_cls.path=a.py", "data.custom_cls.name=A"]
    data = load_config([*own, "+data.tone={loud: 2}"]).config.data
    assert data.tone == data["tone"] == data.get("tone") == {"loud": 2}
    assert (
        "tone" in data
        and "prompt_key" in data
        and "other" not in data
        and data.get("other", 3) == 3
    )
    assert data.get("prompt_key", "p") == "prompt"
    with pytest.raises(
        AttributeError, match=r"data\.other: got a key that does not exist\. \+data\.other=VALUE"
    ):
        _ = data.other
    assert pickle.loads(pickle.dumps(data)) == data
    with pytest.raises(ConfigError, match=r"data\.tone: got a key that does not exist"):
        load_config([*own, "data.tone=2"])
    near = load_config([*own, "+data.my_key=3", "+data.shape.size=2"])
    assert (near.config.data.my_key, near.config.data.shape) == (3, {"size": 2})
    notice = "data.my_key: taken as a key of your own; the package's is data.image_key."
    assert notice in near.notices and "data.shape" not in str(near.notices)
    with pytest.raises(ConfigError, match=r"Did you mean data\.train_batch_size"):
        load_config(["+data.train_batchsize=2"])
    with pytest.raises(
        ConfigError, match=r"expected no keys of your own without data\.custom_cls\.path"
    ):
        load_config(["+data.tone=2"])


def test_an_estimator_of_ones_own_has_options_of_its_own() -> None:
    own = load_config(["algorithm.adv_estimator=a.py:f", "+algorithm.gama=2"])
    assert own.config.algorithm.adv_options == {"gama": 2}
    assert "the package's is algorithm.gamma" in str(own.notices)
    with pytest.raises(ConfigError, match=r"Did you mean algorithm\.gamma"):
        load_config(["algorithm.adv_estimator=grpo", "+algorithm.gama=2"])


def test_the_number_of_keys_is_reviewed() -> None:
    # verl has 556 to 898. Whoever changes this number has weighed whether the key is needed.
    # external_lib: what registers names need not be the file of a reward function. calculate_entropy, which verl has:
    # metrics over rows that the update need not compute cost their computation. zero_indexed_step of both optimizers,
    # which verl has: its schedules begin a step earlier than ours. master_dtype of both: verl's runs in bfloat16 lose
    # small updates, and their numbers depend on it. request_seeds: vLLM draws with a loop over generators, or fast.
    # What leaves the device between phases, which verl has: param_offload of four models, optimizer_offload and
    # grad_offload of the two that learn; and offload_dir, the disk of a CPU. profiler.ranks of three roles, which verl
    # has. optim.total_training_steps of both: schedules of verl's go on where the run ends before.
    # custom_cls.options: a data set written from verl's documents has keys of its own.
    # data.video_key, and fps, min_frames and max_frames of mm_processor_kwargs: a video is cut by them alone.
    # actor.megatron: what Megatron-core has and FSDP2 has not; sizes, dtype and offloading are keys of the roles.
    # expert_parallel_size of three roles, which verl's engines for mixtures of experts have.
    # actor.router_replay and .router_aux_loss_coef: verl has the first, transformers the second; .router_z_loss_coef:
    # Megatron has it. datagen.path, .name and .options: rows that a generator makes between batches need state in the
    # checkpoint. on_bad_row: whether a bad row ends a run, which nobody else can decide. mixture and
    # mixture_until: shares of files, and when such an epoch ends.
    # async_training: the bound, what sequences under way and late ones do, how often weights are published.
    # return_multi_modal_inputs, which verl has: worker processes of the loader send images, or patches.
    # distillation, 22 keys: whom to learn from and how (verl's), and memory and layout, which each role has.
    # env, 15 keys: which environment and agents, what is rewarded, how many episodes, the limits of its processes.
    # streaming: how many rows are read at a time, of files that are not read before a run starts.
    # rollout.expert_parallel_size, which verl has: vLLM divides experts, or the width of each.
    # trainer.progress_s: how long a log may be silent, which depends on who reads it.
    # trainer.save_minutes: a run that is killed has lost little, whoever has set nothing.
    # trainer.rollout_record and .rollout_record_gib: whether rollouts are recorded, and the disk that they may take.
    assert len(leaf_keys()) == 364


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("data.seed=3", "data.seed", 3),
        ("+data.seed=3", "data.seed", 3),
        ("++data.seed=3", "data.seed", 3),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("data.shuffle=True", "data.shuffle", True),
        ("trainer.rollout_record=3", "trainer.rollout_record", 3),
        ("trainer.rollout_record=off", "trainer.rollout_record", "off"),
        ("data.val_batch_size=null", "data.val_batch_size", None),
        ("actor_rollout_ref.rollout.stop_token_ids=[1,2]", "actor_rollout_ref.rollout.stop_token_ids", [1, 2]),
        ('trainer.logger=["console","wandb"]', "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=[console,wandb]", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console", "trainer.logger", "console"),
        # Text stays as it stands, whatever YAML would make of it.
        ("trainer.experiment_name=007", "trainer.experiment_name", "007"),
        ("trainer.experiment_name=1e-6", "trainer.experiment_name", "1e-6"),
        ("trainer.experiment_name=a: b #1", "trainer.experiment_name", "a: b #1"),
        ("trainer.experiment_name='quoted'", "trainer.experiment_name", "quoted"),
        ("data.train_files=*/a=b.parquet", "data.train_files", "*/a=b.parquet"),
        ("data.train_files=['a.parquet', 'b.parquet']", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.tokenizer=null", "data.tokenizer", None),
        ("data.tokenizer=", "data.tokenizer", ""),
        ("actor_rollout_ref.model.custom_chat_template={% for m in messages %}{{ m }}{% endfor %}",
         "actor_rollout_ref.model.custom_chat_template", "{% for m in messages %}{{ m }}{% endfor %}"),
        ("data.apply_chat_template_kwargs={a: 1}", "data.apply_chat_template_kwargs", {"a": 1}),
    ],
)  # fmt: skip
def test_reads(argument: str, key: str, value: Any) -> None:
    found = parse_override(argument)
    assert found == (key, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("data.seed", "equals sign"),
        ("~data.seed", "cannot be removed"),
        ("--data.seed=3", "without dashes"),
        ("run.yaml", "--config run.yaml"),
        ("=3", "equals sign"),
        ("data seed=3", "equals sign"),
        ("data.apply_chat_template_kwargs={a:1}", "space after the colon"),
        ("actor_rollout_ref.rollout.stop_token_ids=[1,", "quotes"),
    ],
)
def test_says_how_to_write_it(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(argument)
    assert hint in caught.value.fix


def test_another_task_says_what_its_keys_take() -> None:
    assert parse_override("engine.loss_agg_mode=007") == ("engine.loss_agg_mode", 7)
    assert parse_override("engine.loss_agg_mode=007", "sft") == ("engine.loss_agg_mode", "007")


@given(number=st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None, max_examples=50)
def test_every_way_python_prints_a_number_is_a_number(number: float) -> None:
    assert parse_override(f"actor_rollout_ref.actor.entropy_coeff={number!r}")[1] == number


@given(number=st.integers(-(10**12), 10**12))
@settings(deadline=None, max_examples=30)
def test_whole_numbers_stay_whole(number: int) -> None:
    value = parse_override(f"data.seed={number}")[1]
    assert (value, type(value)) == (number, int)


def test_references_are_found_wherever_they_hide() -> None:
    kwargs = "actor_rollout_ref.rollout.engine_kwargs"
    with pytest.raises(ConfigError, match="References are not resolved") as caught:
        load_config([kwargs + "={b: [x, '${c.d}']}"])
    assert caught.value.where == kwargs and "${c.d}" in caught.value.got
    assert load_config([kwargs + "={b: [$x, '{c}', '$ {c}']}"]).config
