# SPDX-License-Identifier: Apache-2.0
"""The start of a replay: checkpoint, steps to train again, configuration, predicted time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.config import Config
from quadriga.errors import DataError
from quadriga.observe.records import RecordFolder
from quadriga.trainer.checkpoint import Checkpoints, quarantined_files
from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.settings import RunSettings, configuration_of

_GENERATION_TIMES = ("timing_s/gen", "timing_s/gen_max")
"""Metrics with the seconds of a step that were spent on generation."""


@dataclass(frozen=True)
class ReplayStart:
    """The state that a replay starts from, and the steps that it trains.

    Attributes:
        record: the run's recorded rollouts.
        step: the step that is replayed.
        checkpoint: the checkpoint that the replay starts from. None: the run's start.
        after_step: step of the checkpoint; 0 without a checkpoint.
        configuration: file with the configuration of the replayed step.
        settings: settings in that file.
        skipped: steps since the checkpoint that the run skipped, each with the number of data rows
            that it took from the data, which the replay must take, too.
        recorded_s: seconds that the steps to train took in the run, without generation.
    """

    record: RecordFolder
    step: int
    checkpoint: Path | None
    after_step: int
    configuration: Path
    settings: RunSettings
    skipped: dict[int, int]
    recorded_s: float

    @property
    def is_first(self) -> bool:
        """Whether the replayed step is the first one to train after the checkpoint."""
        return self.after_step == self.step - 1


def find_start(directory: str | Path, step: int) -> ReplayStart:
    """Find the newest checkpoint before a step, and check that the record has the steps since then.

    Args:
        directory: the run's directory.
        step: the step to replay.

    Raises:
        DataError: the directory is no run, something that the replay needs is missing, or the
            settings have changed since the checkpoint.
    """
    folder = RunFolder(directory)
    record = folder.record
    recorded_steps = record.steps()
    if not recorded_steps:
        raise DataError(
            str(record.folder),
            got="no recorded step",
            expected="the record of a run's rollouts",
            fix="Runs of earlier versions and of trainer.rollout_record=off cannot be replayed.",
        )
    # Raises an error if the step is not recorded, or if its file is damaged.
    record.read(step, columns=["uid"])
    path, settings = configuration_of(folder.directory, step, "rl")
    if settings is None:
        raise DataError(
            str(path),
            got="no configuration that can be read",
            expected=f"the configuration of step {step}",
            fix="Put the file back: a replay trains as it says.",
        )

    checkpoints = Checkpoints(folder.directory)
    checkpoint_step = checkpoints.newest(before_step=step)
    after_step = checkpoint_step or 0
    # The quarantine has a file for each skipped step, with one line for each data row.
    skipped = {}
    for skipped_step, rows_file in quarantined_files(folder.directory).items():
        if after_step < skipped_step < step:
            skipped[skipped_step] = rows_file.read_bytes().count(b"\n")
    needed_steps = [number for number in range(after_step + 1, step + 1) if number not in skipped]
    _require_steps(record, step, needed_steps, checkpoint_step)
    # `settings.first` is the first step with these settings.
    if settings.first > after_step + 1:
        begin = "the start of the run"
        if checkpoint_step:
            begin = f"the checkpoint of step {checkpoint_step}"
        raise DataError(
            str(path),
            got=f"settings that changed with step {settings.first}, after {begin}",
            expected="the same settings for all steps that are trained again",
            fix=f"Replay a step before step {settings.first}, because the checkpoint of step "
            f"{settings.first - 1} is gone.",
        )

    # Generation takes most of a step's time, and a replay leaves it out.
    recorded_s = 0.0
    for number in needed_steps:
        metrics = record.read(number, columns=["uid"]).facts["metrics"]
        generation_s = sum(metrics.get(name, 0.0) for name in _GENERATION_TIMES)
        recorded_s += metrics.get("timing_s/step", 0.0) - generation_s
    return ReplayStart(
        record=record,
        step=step,
        checkpoint=None if checkpoint_step is None else checkpoints.path(checkpoint_step),
        after_step=after_step,
        configuration=path,
        settings=settings,
        skipped=skipped,
        recorded_s=recorded_s,
    )


def _require_steps(
    record: RecordFolder, step: int, needed_steps: list[int], checkpoint_step: int | None
) -> None:
    """Refuse a replay if a step that it trains is not recorded.

    Args:
        record: the run's recorded rollouts.
        step: the step that is replayed.
        needed_steps: steps that are trained, the replayed one included.
        checkpoint_step: step of the checkpoint. None: the replay starts with the run.
    """
    recorded_steps = set(record.steps())
    missing_steps = [number for number in needed_steps if number not in recorded_steps]
    if not missing_steps:
        return
    begin = "the start of the run, for no checkpoint precedes the step"
    if checkpoint_step is not None:
        begin = f"the checkpoint of step {checkpoint_step}"
    got = f"no record of {'steps' if len(missing_steps) > 1 else 'step'} "
    got += ", ".join(map(str, missing_steps[:10]))
    got += " and others" if len(missing_steps) > 10 else ""
    raise DataError(
        str(record.folder),
        got=f"{got}; the record has steps {min(recorded_steps)} to {max(recorded_steps)}",
        expected=f"a record of every step up to {step} since {begin}",
        fix="Replay a recorded step right after a checkpoint. In further runs, "
        "trainer.rollout_record=all, a larger trainer.rollout_record_gib and more checkpoints keep "
        "more steps.",
    )


def configure_one_process(config: Config, folder: Path, checkpoint: Path | None) -> Config:
    """Copy the configuration of a run, changed for a replay, which trains in this process.

    Args:
        config: the run's configuration, or an edited one.
        folder: an empty folder, the only place that the replay writes into.
        checkpoint: the checkpoint to start from. None: the run's start.
    """
    policy = config.actor_rollout_ref
    reward_model = config.reward_model
    rollout = _copy_with(
        policy.rollout,
        tensor_model_parallel_size=1,
        data_parallel_size=1,
        trace_dir=None,
        skip=_copy_with(policy.rollout.skip, enable=False),
        serve=_copy_with(policy.rollout.serve, enable=False),
    )
    trainer = _copy_with(
        config.trainer,
        backend="local",
        nnodes=1,
        n_gpus_per_node=1,
        placement="together",
        resource_pools={},
        # The value of this key is a format string, in which braces have to be doubled.
        default_local_dir=str(folder).replace("{", "{{").replace("}", "}}"),
        offload_dir=None,
        resume_mode="disable" if checkpoint is None else "resume_path",
        resume_from_path=None if checkpoint is None else str(checkpoint),
        save_freq=-1,
        save_minutes=None,
        test_freq=-1,
        val_before_train=False,
        val_only=False,
        logger=[],
        rollout_record="all",
        rollout_data_dir=None,
        validation_data_dir=None,
    )
    sections = {
        "actor_rollout_ref": _copy_with(
            policy, actor=_with_one_rank(_without_sharding(policy.actor)), rollout=rollout
        ),
        "critic": _with_one_rank(_without_sharding(config.critic)),
        "reward_model": _copy_with(
            _with_one_rank(reward_model), model=_without_sharding(reward_model.model)
        ),
        "distillation": _with_one_rank(_without_sharding(config.distillation)),
        "trainer": trainer,
        "data": _copy_with(config.data, val_files=""),
        "global_profiler": _copy_with(config.global_profiler, tool=None, steps=[]),
    }
    return _copy_with(config, **sections)


def _copy_with(section: Any, **values: Any) -> Any:
    """Copy a section with other values. pydantic does not check them."""
    return section.model_copy(update=values)


def _with_one_rank(section: Any) -> Any:
    """Copy the section of a role, with every kind of parallelism reduced to one rank."""
    return _copy_with(
        section,
        ulysses_sequence_parallel_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_parallel_size=1,
    )


def _without_sharding(section: Any) -> Any:
    """Copy the section of a role with its weights sharded over all ranks, of which there is one."""
    return _copy_with(section, fsdp_config=_copy_with(section.fsdp_config, fsdp_size=-1))
