# SPDX-License-Identifier: Apache-2.0
"""`quadriga config`, and how commands read their configuration."""

from pathlib import Path

import pytest

from quadriga.cli.config import main
from quadriga.config import load_config, show
from quadriga.errors import ConfigError


def test_show_prints_yaml_and_keeps_notices_apart(capsys, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  seed: 5\n")
    arguments = ["show", "data.shuffle=False", "--config", str(file), "data.seed=6", "data.seed=5"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == show(load_config(["data.shuffle=False"], [file]).config)
    assert printed.err.startswith("notice: data.seed is set twice")


def test_several_files_in_order(capsys, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"data: {{seed: {number}}}\n")
    main(["show", "--config", str(tmp_path / "2.yaml"), "--config", str(tmp_path / "1.yaml")])
    assert "  seed: 1\n" in capsys.readouterr().out


def test_explain_says_what_keeps_a_run_from_starting(capsys) -> None:
    assert main(["explain", "data.train_batch_size=4"]) == 2
    printed = capsys.readouterr().out
    assert "4 prompts x 8 responses = 32 sequences" in printed
    assert "Before training\n  data.train_files: got nothing" in printed
    assert "To know\n" in printed


def test_keys(capsys) -> None:
    assert main(["keys", "optim", "betas"]) == 0
    assert capsys.readouterr().out.count("betas = ") == 2
    assert main(["keys", "use_remove_padding"]) == 0
    assert "use_remove_padding: Sequences are always packed" in capsys.readouterr().out
    assert main(["keys", "optim betas"]) == 0
    assert capsys.readouterr().out.count("betas = ") == 2
    with pytest.raises(ConfigError, match="zebra"):
        main(["keys", "zebra"])


def test_an_unknown_action_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["shaw"])
    assert caught.value.code == 2


def test_a_key_with_dashes_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"Write trainer.seed=2\."):
        main(["show", "--trainer.seed=2"])


def test_keys_are_hidden_and_given_again(capsys, tmp_path: Path) -> None:
    """What `show` prints is read again once the keys are given; before, each is named."""
    given = [
        "custom_reward_function.path=x.py",
        "custom_reward_function.reward_kwargs={judge: {api_key: opensesame, url: 'http://me:opensesame@h', n: 3}}",
        "ray_kwargs.ray_init.runtime_env.env_vars={HF_TOKEN: opensesame, MODE: fast}",
        "actor_rollout_ref.rollout.engine_kwargs.vllm={headers: {Authorization: Bearer opensesame}, max_tokens: '5'}",
    ]
    assert main(["show", *given]) == 0
    printed = capsys.readouterr().out
    assert "opensesame" not in printed and "MODE: fast" in printed and "max_tokens: '5'" in printed
    (tmp_path / "config.yaml").write_text(printed)
    again = ["--config", str(tmp_path / "config.yaml")]
    with pytest.raises(ConfigError, match="4 things") as caught:
        main(["show", *again])
    kwargs = "custom_reward_function.reward_kwargs"
    assert caught.match(
        rf"{kwargs}\.judge\.api_key \(.*line \d+\): got <hidden>.*Give it again: {kwargs}\.judge\.api_key="
    )
    assert load_config([*given], [tmp_path / "config.yaml"]).config == load_config(given).config


@pytest.mark.parametrize(
    "wrong",
    [
        "ray_kwargs.ray_init.runtime_env.env_vars={HF_TOKEN: '${opensesame}'}",
        "ray_kwargs.ray_init.runtime_env.env_vars={HF_TOKEN: opensesame",
        "ray_kwargs.ray_init.runtime_env.env_vars={HF_TOKEN:opensesame}",
        "ray_kwargs.ray_init={_redis_password: opensesame, typo: 1}",
        "data.api_key=opensesame",
        "trainer.seed={password: opensesame}",
        "--api_key = opensesame",
    ],
)
def test_errors_about_values_hide_keys(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(["show", wrong])
    assert "opensesame" not in str(caught.value)
