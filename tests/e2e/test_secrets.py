# SPDX-License-Identifier: Apache-2.0
"""Keys in a configuration reach what needs them and stand in no file that a run writes, nor in what it prints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.cli.main import main
from quadriga.observe.records import RecordFolder
from tests.limits import COMMAND_S

WORD = "opensesame"
REWARD = f'''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, api_key, url):
    if len(solution_str) == 1:
        raise ValueError("401 from https://me:{WORD}@host with Bearer {WORD}")
    return float(api_key == "{WORD}" and url == "https://me:{WORD}@host")
'''
KWARGS = "custom_reward_function.reward_kwargs"
GIVEN = [f"{KWARGS}.api_key={WORD}", f"{KWARGS}.url=https://me:{WORD}@host"]


def test_keys_stand_in_no_file(
    start: Callable,
    tmp_path: Path,
    home: Path,
    arguments: Callable,
    capsys: pytest.CaptureFixture,
    monkeypatch,
) -> None:
    """Every byte that a run leaves is looked at, those of four trackers among them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "reward.py").write_text(REWARD)
    process = start(
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        *GIVEN,
        f"ray_kwargs.ray_init={{runtime_env: {{env_vars: {{MY_PASSWORD: {WORD}}}}}}}",
        "reward_model.max_error_rate=1.0",
        "trainer.logger=[console,jsonl,tensorboard,wandb,mlflow]",
        f"trainer.rollout_data_dir={tmp_path / 'run' / 'rollouts'}",
    )
    printed, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, printed
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "1.jsonl"} <= {path.name for path in files}
    assert [
        path for path in files if WORD.encode() in path.read_bytes()
    ] == [] and WORD not in printed
    # Parquet is compressed.
    for step in (1, 2):
        assert WORD not in str(RecordFolder(tmp_path / "run").read(step).rows.to_pylist())
    config = tmp_path / "run" / "config.yaml"
    assert config.stat().st_mode & 0o777 == 0o600 and f"api_key: {'<hidden>'}" in config.read_text()
    # What a run wrote begins it again, once the keys are given.
    capsys.readouterr()
    assert main(["config", "show", "--config", str(config), *GIVEN]) == 2
    assert "env_vars.MY_PASSWORD" in capsys.readouterr().err
    given = [*GIVEN, f"ray_kwargs.ray_init.runtime_env.env_vars.MY_PASSWORD={WORD}"]
    assert main(["config", "show", "--config", str(config), *given]) == 0
    text = "".join(
        line for line in config.read_text().splitlines(keepends=True) if not line.startswith("# ")
    )
    assert capsys.readouterr().out == text
