# SPDX-License-Identifier: Apache-2.0
"""What every worker is told, and what the roles' workers do alike."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from quadriga.config import (
    ActorConfig,
    BatchingConfig,
    Config,
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    Layout,
    LogProbConfig,
    ModelConfig,
    Sizes,
)
from quadriga.engines import process_group
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.fsdp.memory import Memory
from quadriga.engines.fsdp.sharded_weights import ReadWeight
from quadriga.engines.micro_batches import MicroBatching
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.step import Passes
from quadriga.errors import ConfigError, EngineError
from quadriga.models.adapter_files import base_name, is_factor, open_model
from quadriga.models.flops import peak_flops
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer, Scorer, ValueScorer
from quadriga.models.vision import freeze_tower, parameter_name
from quadriga.models.weight_files import RenamedFiles
from quadriga.observe.machine import Choice, choose_dtype
from quadriga.observe.metrics import Metric
from quadriga.single_controller import WorkerPlace, make_nd_compute_dataproto_dispatch_fn

MESH = "replicas"
"""The name under which a worker registers its place among the data-parallel ranks."""
BY_REPLICA = make_nd_compute_dataproto_dispatch_fn(MESH)
"""A chunk of rows for each data-parallel rank, the same for all of its processes; one of them answers."""


@dataclass(frozen=True)
class RunFacts:
    """What the builder of a run has decided, and a worker cannot know alone.

    Attributes:
        rollout_engine: import string of the function in `workers.rollouts` that makes the generation engine.
        is_trained: whether the policy learns; one that only answers needs neither masters nor an optimizer.
    """

    rollout_engine: str
    is_trained: bool = True


def choose_device(wish: str, local_rank: int = 0) -> torch.device:
    """`auto` is the accelerator where there is one.

    Args:
        wish: `auto`, or a device as torch names it; `cuda` is the process's own of those it sees.
        local_rank: number of the process on its node.

    Raises:
        ConfigError: there is no such device here.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    # Ray shows a process one device, its own; torchrun and the like show all to each.
    if wish == "cuda" and torch.cuda.device_count() > 1:
        wish = f"cuda:{local_rank}"
    try:
        return torch.empty(0, device=wish).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "trainer.device",
            got=f"{wish!r} ({str(error).strip().partition(chr(10))[0]})",
            expected="a device that torch can use here",
            fix="Set trainer.device=auto; `quadriga doctor` says what there is.",
        ) from error


def join(place: WorkerPlace, device: torch.device, config: ActorConfig | CriticConfig, where: str) -> Processes:
    """Meet the other processes of a role, in the layout that its section asks for.

    Args:
        place: of this process.
        device: of its models.
        config: of the role.
        where: the section, for errors.
    """
    world = process_group.join(place, device)
    return Processes.arrange(world, Layout.of(world.size, Sizes.of(config.fsdp_config.fsdp_size, config), where))


@dataclass(frozen=True)
class LoadedModel:
    """A scorer, and where its parameters' values come from: None where it has them."""

    scorer: Scorer
    read: ReadWeight | None


def load_policy(config: Config, dtype: torch.dtype, processes: Processes, *, has_adapter: bool = False) -> LoadedModel:
    """The model of `actor_rollout_ref.model` as a policy; the tower that the configuration freezes is frozen.

    Args:
        config: of the run.
        dtype: of whole weights; shared ones are read when they are cut.
        processes: that will hold it.
        has_adapter: whether it gets the adapter of the configuration, in float32.
    """
    loaded = _load(config, config.actor_rollout_ref.model.path, PolicyScorer, dtype, processes)
    if config.actor_rollout_ref.actor.freeze_vision_tower:
        freeze_tower(loaded.scorer.model)
    return _with_adapter(config, loaded) if has_adapter else loaded


def _with_adapter(config: Config, loaded: LoadedModel) -> LoadedModel:
    read_base = loaded.read
    read_factor = add_adapter(loaded.scorer.model, config.actor_rollout_ref.model, config.trainer.seed)
    if read_base is None:
        return loaded
    return LoadedModel(loaded.scorer, lambda name: read_factor(name) if is_factor(name) else read_base(base_name(name)))


def load_value_function(config: Config, processes: Processes) -> LoadedModel:
    """The model of `critic.model` with a value head."""
    path = config.critic.model.path or config.actor_rollout_ref.model.path
    return _load(config, path, ValueScorer, torch.float32, processes)


def _load(config: Config, path: str, scorer: type[Scorer], dtype: torch.dtype, processes: Processes) -> LoadedModel:
    model = config.actor_rollout_ref.model
    options = {"trust_remote_code": model.trust_remote_code, "override_config": model.override_config}
    # The name of a model on a hub is no folder yet: transformers fetches it, and loads it whole.
    if processes.layout.is_whole or not Path(path).is_dir():
        return LoadedModel(scorer(load_causal_lm(path, dtype=dtype, device=processes.world.device, **options)), None)
    skeleton = scorer(skeleton_causal_lm(path, **options))
    return LoadedModel(skeleton, _reader(path, skeleton.model))


def _reader(path: str, skeleton: PreTrainedModel) -> ReadWeight:
    """Reads a parameter from the files of a model; a value head that they do not have is zero."""
    files = RenamedFiles(open_model(path), partial(parameter_name, skeleton.config))
    names, shapes = set(files.names()), {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    missing = [name for name in shapes if name not in names and not name.startswith("value_head.")]
    if missing:
        raise EngineError(
            f"model {path}",
            got=f"no weights for {len(missing)} parameters, first {missing[0]}",
            expected="all weights of the model, under the names that transformers gives them",
            fix="Load and save it once with transformers, or set fsdp_config.fsdp_size=1.",
        )
    return lambda name: files.read(name) if name in names else torch.zeros(shapes[name])


def compute_dtype(config: FSDPConfig, device: torch.device) -> Choice:
    """The dtype of the weights that compute, with its reason."""
    return choose_dtype(config.model_dtype, device)


def make_engine(
    loaded: LoadedModel,
    config: ActorConfig | CriticConfig,
    dtype: torch.dtype,
    processes: Processes,
    *,
    name: str,
    model: ModelConfig | CriticModelConfig | None = None,
) -> FSDPEngine:
    """The engine of a role.

    Args:
        loaded: the model.
        config: of the role.
        dtype: of the weights that compute.
        processes: that hold it.
        name: of the role, for errors.
        model: the section of the model, for one that learns; None: it is only asked.
    """
    fsdp = config.fsdp_config
    return FSDPEngine(
        loaded.scorer,
        read=loaded.read,
        dtype=dtype,
        device=processes.world.device,
        processes=processes,
        training=Training(config.optim, config.grad_clip, config.max_nonfinite_steps) if model else None,
        memory=Memory(
            gradient_checkpointing=model is not None and model.enable_gradient_checkpointing,
            activation_offload=model is not None and model.enable_activation_offload,
            reshard_after_forward=fsdp.reshard_after_forward,
            offload_weights=fsdp.offload_policy,
        ),
        name=name,
    )


def passes(config: BatchingConfig, responses_per_prompt: int, *, share_prompts: bool, global_step: int) -> Passes:
    """How a role learns from the batch of one step."""
    num_sequences = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
    return Passes(
        mini_batch_size=config.ppo_mini_batch_size * responses_per_prompt,
        num_epochs=config.ppo_epochs,
        micro=MicroBatching(num_sequences, config.ppo_max_token_len_per_gpu, share_prompts),
        shuffle_seed=config.data_loader_seed + global_step * config.ppo_epochs if config.shuffle else None,
    )


def inference_pieces(config: LogProbConfig, *, share_prompts: bool) -> MicroBatching:
    """How a pass without gradients is cut."""
    num_sequences = None if config.log_prob_use_dynamic_bsz else config.log_prob_micro_batch_size_per_gpu
    return MicroBatching(num_sequences, config.log_prob_max_token_len_per_gpu, share_prompts)


class Utilisation:
    """How much of the device's measured peak an update reached.

    Args:
        device, dtype: of the computation. The peak is measured once, on first use; where that was at a busy moment, a
            rate that an update reaches raises it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.peak: float | None = None

    def measure(self, metrics: dict[str, Metric], name: str, seconds: float) -> dict[str, Metric]:
        """Add `perf/mfu/NAME` to the metrics of an update that took `seconds`."""
        if self.peak is None:
            self.peak = peak_flops(self.device, self.dtype)
        rate = metrics.pop(f"perf/flops/{name}").value / seconds
        self.peak = max(self.peak, rate)
        return metrics | {f"perf/mfu/{name}": Metric(rate / self.peak)}


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self.start
