# SPDX-License-Identifier: Apache-2.0
"""Event files hold what was logged; a continued run replaces what it does again. Read with TensorBoard's own reader."""

from importlib.util import find_spec

import pytest

from quadriga.observe.tracking.services import TensorboardBackend

# Not imported where tests are collected, which every process does.
pytestmark = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="needs tensorboard: pip install -e '.[tensorboard]'"
)


def read(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(
        str(directory / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}
    )
    return accumulator.Reload()


def scalars(directory, name) -> dict[int, float]:
    return {event.step: event.value for event in read(directory).Scalars(name)}


def test_scalars_are_on_disk_at_once_and_a_continued_run_purges(make_run):
    run = make_run()
    backend = TensorboardBackend(run)
    for step in range(1, 5):
        backend.log({"reward": float(step)}, step)
    assert scalars(run.directory, "reward") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    backend.close()
    continued = TensorboardBackend(make_run(resume_step=2))
    continued.log({"reward": 30.0}, 3)
    continued.close()
    assert scalars(run.directory, "reward") == {1: 1.0, 2: 2.0, 3: 30.0}


def test_samples_and_configuration_are_text(make_run, samples):
    run = make_run()
    backend = TensorboardBackend(run)
    backend.log_samples(samples, 5)
    backend.close()
    events = read(run.directory)
    (event,) = events.Tensors("samples/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 5
    assert lines[0] == "| input | output | score | step_in_game |"
    assert lines[2] == "| Which is \\| the<br>largest? | 82 | 1.0 | [1, 2] |"
    (config,) = events.Tensors("config/text_summary")
    assert b'"project_name": "numbers"' in config.tensor_proto.string_val[0]
