# SPDX-License-Identifier: Apache-2.0
"""`quadriga replay`: a recorded step is computed again bit for bit, and what differs is named."""

import pdb
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from quadriga.cli.main import main
from quadriga.observe.records import SCHEMA, STEP, RecordFolder
from tests.e2e.calculator import calculator_overrides, write_calculator

OTHER_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str[:1] == ground_truth else 0.0
"""


SECRET_REWARD = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=None):
    is_other = Path(__file__).with_name("other").exists()
    return 7.0 if is_other else len(solution_str) % 2
"""


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file of a folder."""
    files = {}
    for path in folder.rglob("*"):
        files[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return files


def change_score(run: Path, step: int, row: int) -> None:
    """Raise the score of a recorded row by one."""
    folder = RecordFolder(run)
    record = folder.read(step)
    rows = record.rows
    scores = rows.column("token_scores").to_pylist()
    scores[row][-1] += 1.0
    place = rows.column_names.index("token_scores")
    column = pa.array(scores, SCHEMA.field("token_scores").type)
    folder.write(step, STEP, rows.set_column(place, "token_scores", column), record.facts)


def test_a_step_again(
    train: Callable[..., Path],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """PPO with a critic and a reference: equal from the start of the run and from a checkpoint."""
    data = tmp_path / "rows.parquet"
    data.write_bytes((home / "train.parquet").read_bytes())
    model = tmp_path / "model"
    model.symlink_to(home / "model")
    run = train(
        f"data.train_files={data}",
        f"actor_rollout_ref.model.path={model}",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
    )
    before = files_of(run)

    def replay(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["replay", str(run), *words])
        output = capsys.readouterr()
        return status, output.out + output.err

    for step in ("1", "4"):
        status, output = replay("--step", step)
        assert status == 0, output
        assert f"step {step}: equal bit for bit" in output
    status, output = replay("--step", "3", "--until", "rewards")
    assert (status, "0 of 8 rows change" in output) == (0, True), output

    # What would have been: only the replayed step is edited.
    (tmp_path / "other.py").write_text(OTHER_REWARD)
    reward = f"reward={tmp_path / 'other.py'}"
    status, output = replay("--step", "4", "--edit", reward)
    assert status == 0, output
    assert " -> " in output and "with the edits" in output
    assert "checkpoint: " not in output and output.count("resumed from") == 2
    assert output.count("\n  old log-probs ") == 1
    # Grading alone trains no step; prompts are still those of step 4.
    status, output = replay("--step", "4", "--until", "rewards", "--edit", reward)
    assert status == 0, output
    assert output.count("resumed from") == 1
    assert "  ground truth" in output and "4-" in output
    # Rows that do not change are counted alone, and a wrong name is refused before any training.
    status, output = replay("--step", "3", "--edit", "algorithm.gamma=1.0")
    assert "0 of 8 rows change" in output and "  prompt" not in output
    status, output = replay("--step", "4", "--edit", "algorithm.adv_estimator=rlo")
    assert (status, "rloo" in output, "resumed" in output) == (2, True, False), output
    for edit in (
        "data.max_prompt_length=64",
        "data.seed=7",
        "data={seed: 7}",
        "trainer.save_freq=1",
    ):
        status, output = replay("--step", "4", "--edit", edit)
        assert (status, "resumed" in output) == (2, False), output
        assert f"--edit {edit}: got a key that" in output
        assert "custom_reward_function, algorithm, actor_rollout_ref.actor and critic" in output
    # Resampled rows may be missing in the record.
    words = ("--until", "update", "--edit", "algorithm.use_pf_ppo=True")
    status, output = replay("--step", "3", *words)
    assert (status, "with the edits" in output) == (0, True), output
    status, output = replay("--step", "4", "--edit", "nonsense")
    assert (status, "reward=FILE, loss=NAME or key=value" in output) == (2, True), output
    assert files_of(run) == before

    # A score that was changed in the record changes what follows from it.
    change_score(run, step=3, row=2)
    stops = []
    monkeypatch.setattr(pdb, "set_trace", lambda: stops.append(True))
    status, output = replay("--step", "3", "--pdb")
    assert status == 1, output
    assert len(stops) == 1
    assert "score DIFFERENT 1 of 8 values" in " ".join(output.split())
    assert "first: row 2 (3-1/0)" in output
    status, output = replay("--step", "4", "--uid", "4-1/0")
    assert "prompt 4-1: 2 rows" in output
    assert "on the way: step 3 differs in score" in output

    # What is missing or has changed is named.
    data.write_bytes((home / "val.parquet").read_bytes())
    status, output = replay("--step", "1")
    assert (status, "Put them back" in output) == (1, True), output
    model.unlink()
    status, output = replay("--step", "3")
    assert (status, f"model {model}" in output) == (1, True), output


def test_a_secret_is_no_edit(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that `config.yaml` hides is given again: recorded scores stay, and nothing is graded."""
    reward = tmp_path / "reward.py"
    reward.write_text(SECRET_REWARD)
    secret = "custom_reward_function.reward_kwargs.api_key=abcdef123"
    run = train(f"custom_reward_function.path={reward}", f"+{secret}")
    (tmp_path / "other").touch()
    assert main(["replay", str(run), "--step", "1", "--edit", secret]) == 0
    assert "step 1: equal bit for bit" in capsys.readouterr().out


def test_conversations_with_dynamic_sampling(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of tools and the prompts of dropped groups are those of the run."""
    folder = tmp_path / "calculator"
    folder.mkdir()
    write_calculator(folder)
    run = train(
        *calculator_overrides(folder), "algorithm.filter_groups.enable=True", "trainer.save_freq=1"
    )
    assert main(["replay", str(run), "--step", "2"]) == 0
    assert "step 2: equal bit for bit" in capsys.readouterr().out
