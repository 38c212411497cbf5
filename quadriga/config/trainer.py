# SPDX-License-Identifier: Apache-2.0
"""`trainer`, `ray_kwargs`, `global_profiler`: length, machines, checkpoints and validation of a run."""

from difflib import get_close_matches
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen
from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, model_validator

from quadriga.config.base import Findings, ReadIf, Section, notice_unused, refuse
from quadriga.config.types import Count, Meaning, Name, PathText, ResumeMode
from quadriga.errors import ConfigError

Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab"]
# -1 stands first in the Literal: its type decides that command lines are read as YAML, not as text.
_FREQUENCY = "-1, a whole number of at least 1, or after_each_epoch"
Frequency = Annotated[Literal[-1, "after_each_epoch"] | Count, Meaning(_FREQUENCY)]
AT_THE_END = 1_000_000_000
"""`save_freq` of a run that writes a checkpoint only after its last step."""
_KEPT_ROLLOUTS = "all, off, or a whole number of at least 1"
KeptRollouts = Annotated[Count | Literal["all", "off"], Meaning(_KEPT_ROLLOUTS)]
Arrangement = Literal["together", "grouped", "apart"]
Placed = Annotated[
    Arrangement | dict[str, Name],
    Meaning("together, grouped, apart, or a dictionary of role: pool"),
]
_POOLS = "a dictionary of pool: list, each list a whole number of at least 1 for each machine"
Pools = Annotated[dict[str, Annotated[list[Count], MinLen(1)]], Meaning(_POOLS)]
# Arguments of ray.init about the address and the resources of a cluster. The run itself sets those
# about printing.
RAY_INIT_KEYS = frozenset(
    {
        "address",
        "num_cpus",
        "num_gpus",
        "resources",
        "labels",
        "object_store_memory",
        "object_spilling_directory",
        "include_dashboard",
        "dashboard_host",
        "dashboard_port",
        "namespace",
        "runtime_env",
        "_memory",
        "_metrics_export_port",
        "_node_ip_address",
        "_node_name",
        "_plasma_directory",
        "_redis_password",
        "_redis_username",
        "_system_config",
        "_temp_dir",
    }
)


def _check_directory_pattern(value: str) -> str:
    """Validate a directory, in which only the names of project and run may be inserted.

    Raises:
        PydanticCustomError: it is empty, has a lone brace, or another name in braces.
    """
    try:
        # The names in braces. Text after the last brace comes with None.
        names = {name for _, name, _, _ in Formatter().parse(value) if name is not None}
    except ValueError:
        # A brace without its counterpart, which the check below refuses.
        names = {value}
    if value == "" or names - {"project_name", "experiment_name"}:
        raise refuse("a directory; {project_name} and {experiment_name} may stand in it")
    return value


def _check_name_in_path(value: str) -> str:
    """Validate a name, which may have folders, but must not lead out of the outputs.

    Raises:
        PydanticCustomError: it has `..`, NUL or a line end, or begins with a slash.
    """
    parts = value.split("/")
    if not parts[0] or ".." in parts or not {"\0", "\n", "\r"}.isdisjoint(value):
        raise refuse("a name without '..', NUL or line end that does not begin with '/'")
    return value


def _check_ray_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """Validate arguments of `ray.init`, and drop those that are null.

    Raises:
        PydanticCustomError: an argument is not in `RAY_INIT_KEYS`.
    """
    unknown_names = [name for name in value if name not in RAY_INIT_KEYS]
    if unknown_names:
        close_names = get_close_matches(unknown_names[0], RAY_INIT_KEYS, n=1, cutoff=0.6)
        fix = f"Did you mean {close_names[0]}?" if close_names else ""
        raise refuse(f"keys out of {', '.join(sorted(RAY_INIT_KEYS))}", fix)
    return {name: argument for name, argument in value.items() if argument is not None}


class TrainerConfig(Section):
    """Length, machines and output of a run."""

    total_epochs: Count | None = None
    """Passes over the training data after which the run ends. null: 1, or as many as `total_training_steps` takes. With
    `algorithm.filter_groups` the run ends with the step that takes the last batch of the last pass."""
    total_training_steps: Count | None = None
    """Training steps after which the run ends, where `total_epochs` does not end it before. null: as many as those
    take."""
    project_name: Annotated[Name, AfterValidator(_check_name_in_path)] = "quadriga"
    """Name of the project, for trackers and for the run's directory."""
    experiment_name: Annotated[Name, AfterValidator(_check_name_in_path)] = "run"
    """Name of the run, for trackers and for the run's directory."""
    logger: Tracker | list[Tracker] = ["console"]
    """Trackers that metrics are logged to: one name or a list."""
    seed: NonNegativeInt = 1
    """Seed of every random choice of the run except the order of the data (`data.seed`)."""
    device: Name = "auto"
    """Device that computes: auto, cpu, cuda, cuda:1, ... auto: the accelerator where there is one."""
    backend: Literal["local", "ray"] = "local"
    """local: all in one process; ray: worker processes, on one machine or on many (multi-node)."""
    nnodes: Count = 1
    """Machines (nodes) that a resource pool spans."""
    n_gpus_per_node: Count = 1
    """Ranks of a resource pool on each machine, a process each (docs/async.md: vLLM beside training takes several): one
    per GPU or, without GPUs, so many that share the cores."""
    save_freq: Frequency = -1
    """Training steps between checkpoints, or after_each_epoch; the last step also writes one. -1: no checkpoints. Not
    given: `save_minutes` decides."""
    save_minutes: PositiveFloat | None = 10
    """Minutes between checkpoints of a run in lockstep for which `save_freq` is not given. The last step also writes
    one. One is put off while the disk has no room for it, or while checkpoints would take more than 5 % of the run's
    time. null: none; so it is where `save_freq` is given, and with `quadriga verl`."""
    esi_redundant_time: NonNegativeInt = 0
    """Seconds to spare before the time at which the machine is taken back, as the environment says: a checkpoint is
    written after a step that may be the last one before it, if `save_freq` asks for any."""
    test_freq: Frequency = -1
    """Training steps between validations, or after_each_epoch; the last step also has one. -1: none (supervised tasks:
    before and after)."""
    val_before_train: bool = True
    """Whether the untrained model is validated first, if there are validation files."""
    progress_s: Count | None = None
    """Seconds without output after which a log gets a line that says what the run is doing; for runs that a person
    watches. On a terminal a bar shows it. null: lines come with steps, and with waits of half a minute."""
    default_local_dir: Annotated[PathText, AfterValidator(_check_directory_pattern)] = (
        "outputs/{project_name}/{experiment_name}"
    )
    """Directory of the run: checkpoints, metrics, the resolved configuration, and after a supervised task `model`."""
    offload_dir: PathText | None = None
    """Folder for what leaves a CPU's memory (`fsdp_config.param_offload`, `optimizer_offload`), in memory-mapped files
    that end with their process; on a disk. null: `offload` in `default_local_dir`. On CUDA it goes to pinned
    memory of the host."""
    resume_mode: ResumeMode = "auto"
    """auto: resume from the run's newest checkpoint, if any; disable: start from scratch; resume_path: resume from
    `resume_from_path`."""
    resume_from_path: Annotated[PathText | None, ReadIf("resume_mode", ("resume_path",))] = None
    """Checkpoint to resume from, with `resume_mode=resume_path`."""
    resume_fallback: Annotated[
        Literal["newest_intact", "none"], ReadIf("resume_mode", ("auto",))
    ] = "newest_intact"
    """Action if the newest checkpoint of a run is damaged. newest_intact: resume from the newest earlier one that is
    not, and keep the damaged one under another name; none: end the run."""
    max_ckpt_to_keep: Count | None = None
    """Checkpoints that stay on disk; older ones are deleted. null: all; of those that `save_minutes` writes, two."""
    log_val_generations: NonNegativeInt = 0
    """Validation responses to show in each tracker. 0: none."""
    placement: Placed = "together"
    """Roles that are colocated in one resource pool. together: all; grouped: actor with rollout, critic with reference;
    apart: none. Or the pool of each role by name: {actor_rollout: one, ref: two, critic: two}."""
    resource_pools: Pools = {}
    """Pools of another shape than `nnodes` and `n_gpus_per_node` say: name -> ranks on each machine."""
    max_worker_restarts: NonNegativeInt = 3
    """Times within an hour that the workers are started again after a process or a node was lost; the run goes on from
    its newest state. A completed checkpoint resets the count."""
    stall_timeout_s: Annotated[int, Ge(10)] = 300
    """Seconds after which a worker process whose control thread does not answer is killed and counts as lost. One that
    answers may work for as long as it likes."""
    check_memory: Literal["refuse", "warn", "off"] = "refuse"
    """Check of the predicted peak of each phase at the start, on an accelerator. refuse: a run whose peak is above 1.15
    times the device's memory does not start, one above 0.95 gets a warning; warn: warnings only; off: no check."""
    phase_timeout_s: Count | None = 7200
    """Seconds that one call of a worker may take in training (generation of a batch, a validation,
    an update, loading a model). Beyond them the stacks of all processes are printed, and it is
    killed and counts as lost. A call that has taken half of them is named. null: no limit."""
    max_skipped_steps: NonNegativeInt = 1
    """Steps that a run may skip because they have lost workers twice, never two in a row. Their rows
    are written to `quarantine` in the run's directory. 0: such a step ends the run."""
    state_copies: bool = True
    """Whether the state after each step is copied into the nodes' memory, so that a lost process costs no more than a
    step (on Ray, where restarts are allowed); it takes twice the size of the trained weights and their optimizer."""
    balance_batch: bool = True
    """Whether sequences are balanced over data-parallel ranks by their lengths."""
    val_only: bool = False
    """Whether the run ends after its first validation."""
    critic_warmup: NonNegativeInt = 0
    """Training steps at the beginning in which only the critic learns."""
    rollout_record: KeptRollouts = "all"
    """Rollouts that are recorded below `default_local_dir`, as Parquet: those of all steps and validations; those of
    the newest N steps, and without texts those since the oldest checkpoint; or off."""
    rollout_record_gib: PositiveFloat = 2
    """GiB that the record of rollouts may take. Beyond, it loses first the texts of its oldest steps, then these steps,
    except those since the oldest checkpoint."""
    rollout_data_dir: PathText | None = None
    """Directory for the responses of every step, as JSONL. null: they are only in the record of rollouts."""
    validation_data_dir: PathText | None = None
    """Directory for the responses of every validation, as JSONL. null: they are only in the record of rollouts."""

    @model_validator(mode="before")
    @classmethod
    def _turn_off_save_minutes(cls, values: Any) -> Any:
        """Set `save_minutes` to null if only `save_freq` is given: steps then decide about saving.

        So `show` shows what is used, and no notice says that `save_minutes` is not read.
        """
        if isinstance(values, dict) and "save_freq" in values and "save_minutes" not in values:
            return {**values, "save_minutes": None}
        return values

    @property
    def directory(self) -> Path:
        """`default_local_dir` with the names inserted."""
        path = self.default_local_dir.format(
            project_name=self.project_name, experiment_name=self.experiment_name
        )
        return Path(path).expanduser()

    @property
    def offload_directory(self) -> Path:
        """`offload_dir`, or its default in the run's directory."""
        if self.offload_dir:
            return Path(self.offload_dir).expanduser()
        return self.directory / "offload"

    @property
    def loggers(self) -> list[str]:
        """`logger` as a list, each name once."""
        return [self.logger] if isinstance(self.logger, str) else list(dict.fromkeys(self.logger))

    @property
    def max_epochs(self) -> int | None:
        """Passes over the training data that end the run; None if only steps end it."""
        return self.total_epochs or (None if self.total_training_steps else 1)

    def num_steps(self, epoch_steps: int) -> int:
        """Number of training steps of a run.

        Args:
            epoch_steps: number of steps of an epoch.
        """
        # None stands for no limit. At least one is set: `max_epochs` is 1 if neither key is given.
        limits = (self.total_training_steps, self.max_epochs and self.max_epochs * epoch_steps)
        return min(limit for limit in limits if limit)

    def processes_of(self, pool: str) -> list[int]:
        """Processes on each machine of a resource pool."""
        return list(self.resource_pools.get(pool, [self.n_gpus_per_node] * self.nnodes))

    def findings(self, at: str) -> Findings:
        if self.val_only and not self.val_before_train:
            yield ConfigError(
                f"{at}.val_only",
                f"true, with {at}.val_before_train=False",
                "the first validation",
                f"Nothing would run: set {at}.val_before_train=True.",
            )
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            yield ConfigError(
                f"{at}.resume_from_path",
                f"null, with {at}.resume_mode=resume_path",
                "a checkpoint",
                f"Name its directory, or set {at}.resume_mode=auto.",
            )
        # Checkpoints by steps replace those by the clock.
        if self.save_freq != -1:
            because = f"{at}.save_freq is {self.save_freq}"
            yield from notice_unused([f"{at}.save_minutes"] if self.save_minutes else [], because)
        elif not self.save_minutes and not self.val_only:
            if self.max_ckpt_to_keep:
                yield from notice_unused([f"{at}.max_ckpt_to_keep"], "no checkpoint is written")
            yield (
                f"{at}.save_freq: no checkpoint is written; the trained weights end with the run."
            )
        steps = self.total_training_steps
        if steps is not None and self.critic_warmup >= steps:
            yield ConfigError(
                f"{at}.critic_warmup",
                f"{self.critic_warmup}, with {at}.total_training_steps={steps}",
                f"at most {steps - 1}",
                "The actor would never learn.",
            )


class RayConfig(Section):
    """The cluster; read with `trainer.backend=ray`."""

    ray_init: Annotated[dict[str, Any], AfterValidator(_check_ray_arguments)] = {}
    """Arguments of `ray.init`, such as `address` (a cluster that is up) or `num_cpus` (of one that is started for the
    run). Without an address: that of the variable RAY_ADDRESS, else a cluster on this machine for the run alone."""
    timeline_json_file: PathText | None = None
    """File for a timeline of Ray's tasks, to be opened in a trace viewer. null: none."""


class ProfilerConfig(Section):
    """The profiler."""

    tool: Annotated[
        Literal["torch", "torch_memory", "nsys"] | None, ReadIf("steps", ([],), is_listed=False)
    ] = None
    """`torch` writes a timeline of all processes, `torch_memory` memory snapshots (CUDA), `nsys` runs them under Nsight
    Systems (CUDA). null: no profile."""
    steps: Annotated[list[Count], ReadIf("tool", (None,), is_listed=False)] = []
    """Training steps to profile, counted from 1."""
    save_path: PathText = "outputs/profile"
    """Directory for profiles."""
    profile_continuous_steps: bool = False
    """Whether neighbouring steps share one profile instead of having one each."""
