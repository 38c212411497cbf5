# SPDX-License-Identifier: Apache-2.0
"""The picture shows what was measured. Whether it is beautiful, a person must see."""

import json

import numpy as np
import pytest

from curve import _series, _validation, plot_curves, smooth
from quadriga.errors import DataError

pytest.importorskip(
    "matplotlib", reason="the learning curve needs matplotlib: pip install -e '.[plot]'"
)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_records(num_steps: int = 6) -> list[dict]:
    records = [{"step": 0, "val-core/quadriga/largest/reward/mean@1": 0.25}]
    for step in range(1, num_steps + 1):
        records.append(
            {"step": step, "critic/rewards/mean": step / 10, "perf/throughput": 1000.0 + step}
        )
    return records


def test_a_straight_line_is_smoothed_to_itself_up_to_its_ends():
    steps = np.array([0.0, 1, 2, 5, 6, 11])
    np.testing.assert_allclose(smooth(steps, 3 * steps + 1, width=2.0), 3 * steps + 1, atol=1e-9)


def test_smoothing_takes_noise_away_and_one_point_is_its_own_curve():
    steps = np.arange(200.0)
    noise = np.where(steps % 2 == 0, 1.0, -1.0)
    assert np.abs(smooth(steps, noise, width=6.0)).max() < 0.35
    np.testing.assert_allclose(smooth(np.array([3.0]), np.array([0.5]), width=1.0), [0.5])


def test_series_leave_out_steps_without_a_finite_value():
    steps = {
        1: {"critic/rewards/mean": 0.5},
        2: {"critic/rewards/mean": float("nan")},
        3: {"actor/lr": 1.0},
    }
    at, values = _series(steps, "reward")
    assert at.tolist() == [1.0] and values.tolist() == [0.5]


def test_one_line_per_data_source_named_by_the_caller_if_it_is_the_only_one():
    one = {
        0: {
            "val-core/a/b/reward/mean@2": 0.5,
            "val-core/a/b/acc/mean@2": 0.6,
            "val-core/a/b/reward/best@2/mean": 0.7,
        }
    }
    assert {name: series[1].tolist() for name, series in _validation(one, "accuracy").items()} == {
        "accuracy": [0.5]
    }
    two = {0: {**one[0], "val-core/c/reward/mean@2": 0.1}}
    assert list(_validation(two, "accuracy")) == ["a/b (mean@2)", "c (mean@2)"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written_whole_and_nothing_else(tmp_path, suffix):
    metrics = write(tmp_path / "metrics.jsonl", run_records())
    output = tmp_path / "pictures" / f"curve.{suffix}"
    assert plot_curves(metrics, output, title="A title", subtitle="A subtitle") == output
    assert list(output.parent.iterdir()) == [output]
    head = output.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    if suffix == "svg":
        assert b"A title" in output.read_bytes() and b"tokens per second" in output.read_bytes()


def test_a_run_with_validation_only_and_one_with_a_single_step_can_be_drawn(tmp_path):
    for index, records in enumerate((run_records(0), run_records(1)[1:])):
        output = plot_curves(write(tmp_path / f"{index}.jsonl", records), tmp_path / f"{index}.png")
        assert output.stat().st_size > 5000


def test_a_file_without_anything_to_draw_is_refused(tmp_path):
    with pytest.raises(DataError, match="no rewards and no validation results"):
        plot_curves(write(tmp_path / "m.jsonl", [{"step": 1, "actor/lr": 1.0}]), tmp_path / "x.png")
