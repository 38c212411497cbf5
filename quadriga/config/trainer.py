# SPDX-License-Identifier: Apache-2.0
"""`trainer`: how long a run is, on what it runs, where it lies, and when it saves, validates and resumes."""

from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quadriga.config.base import Count, Meaning, MinusOneOrCount, Name, NonNegativeInt, PathText, Section, refuse

Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab"]
Arrangement = Literal["together", "grouped", "apart"]
_PLACEMENT = "together, grouped, apart, or a dictionary of role: pool"
_POOLS = "a dictionary of pool: list, each list a whole number of at least 1 for each machine"


def _resume_word(value: Any) -> Any:
    return "resume_path" if value == "path" else value


def known_places(value: str) -> str:
    """A directory in which only the names of project and run are to be filled in; others are refused."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(value) if name is not None}
    except ValueError:
        names = {value}
    if value == "" or names - {"project_name", "experiment_name"}:
        raise refuse("a directory; {project_name} and {experiment_name} may stand in it")
    return value


class RunConfig(Section):
    """The run, as `quadriga train` and `quadriga sft` both have it."""

    total_epochs: Count = 1
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Training steps after which the run ends. null: epochs times batches of an epoch."""
    project_name: Name = "quadriga"
    """Name of the project, for trackers and for the run's directory."""
    experiment_name: Name = "run"
    """Name of the run, for trackers and for the run's directory."""
    logger: Tracker | list[Tracker] = Field(default_factory=lambda: ["console"])
    """Where metrics go: one name or a list."""
    seed: NonNegativeInt = 1
    """Seed of every random choice of the run except the order of the data (`data.seed`)."""
    device: Name = "auto"
    """Device that computes: auto, cpu, cuda, cuda:1, ... auto: the accelerator where there is one."""
    backend: Literal["local", "ray"] = "local"
    """local: all in one process; ray: the models in processes of their own, on one machine or on many."""
    nnodes: Count = 1
    """Machines that a pool of processes spans."""
    n_gpus_per_node: Count = 1
    """Processes of a pool on each machine: one per GPU or, without GPUs, so many that share the cores."""
    save_freq: MinusOneOrCount = -1
    """Training steps between checkpoints; the last step has one too. -1: no checkpoints."""
    esi_redundant_time: NonNegativeInt = 0
    """Seconds to spare when the machine is taken back at a time that the environment names: a checkpoint is written
    after each step that may be the last but for this, if `save_freq` asks for any."""
    test_freq: MinusOneOrCount = -1
    """Training steps between validations; the last step has one too. -1: none while training."""
    val_before_train: bool = True
    """Whether the untrained model is validated first, where there are validation files."""
    default_local_dir: Annotated[PathText, AfterValidator(known_places)] = "outputs/{project_name}/{experiment_name}"
    """Directory of the run: checkpoints, metrics, the resolved configuration."""
    resume_mode: Annotated[Literal["auto", "disable", "resume_path"], BeforeValidator(_resume_word)] = "auto"
    """auto: go on from the run's newest checkpoint, if any; disable: start anew; resume_path: from the given one."""
    resume_from_path: PathText | None = None
    """Checkpoint to go on from, with `resume_mode=resume_path`."""
    max_ckpt_to_keep: Count | None = None
    """Checkpoints that stay on disk; older ones are deleted. null: all."""

    @property
    def directory(self) -> Path:
        """`default_local_dir` with its names filled in."""
        places = {"project_name": self.project_name, "experiment_name": self.experiment_name}
        return Path(self.default_local_dir.format(**places)).expanduser()

    @property
    def loggers(self) -> list[str]:
        """`logger` as a list, each name once."""
        return [self.logger] if isinstance(self.logger, str) else list(dict.fromkeys(self.logger))


class TrainerConfig(RunConfig):
    """The run."""

    log_val_generations: NonNegativeInt = 0
    """Validation answers to show in each tracker. 0: none."""
    placement: Annotated[Arrangement | dict[str, Name], Meaning(_PLACEMENT)] = "together"
    """Which models share processes. together: all; grouped: actor and rollout, critic and reference; apart: none.
    Or the pool of each role by name: {actor_rollout: one, ref: two, critic: two}."""
    resource_pools: Annotated[dict[str, Annotated[list[Count], Field(min_length=1)]], Meaning(_POOLS)] = Field(
        default_factory=dict
    )
    """Pools of another shape than `nnodes` and `n_gpus_per_node` say: name -> processes on each machine."""
    max_worker_restarts: NonNegativeInt = 0
    """Times that the workers are built anew after one of them failed; the run goes on from its last checkpoint."""
    balance_batch: bool = True
    """Whether the sequences of a batch are dealt so that every data-parallel process gets the same amount of work."""
    val_only: bool = False
    """Whether the run ends after its first validation, which it then has in any case."""
    critic_warmup: NonNegativeInt = 0
    """Training steps in which only the critic learns."""
    rollout_data_dir: PathText | None = None
    """Directory for the responses of every step, as JSONL. null: they are not written."""
    validation_data_dir: PathText | None = None
    """Directory for the responses of every validation, as JSONL. null: they are not written."""

    def processes_of(self, pool: str) -> list[int]:
        """Processes on each machine of a resource pool."""
        return list(self.resource_pools.get(pool, [self.n_gpus_per_node] * self.nnodes))
