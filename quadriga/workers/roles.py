# SPDX-License-Identifier: Apache-2.0
"""What every worker is told, and what the roles' workers do alike."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import ActorConfig, BatchingConfig, Config, CriticConfig, FSDPConfig, LogProbConfig
from quadriga.engines.base import TrainEngine
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.micro_batches import MicroBatching
from quadriga.engines.step import Passes
from quadriga.errors import CheckpointError, ConfigError, QuadrigaError
from quadriga.models.flops import peak_flops
from quadriga.models.load import load_causal_lm
from quadriga.models.scorers import PolicyScorer, ValueScorer
from quadriga.observe.machine import Choice, choose_dtype
from quadriga.observe.metrics import Metric

HF_FOLDER = "huggingface"
"""Where a role's part of a checkpoint has the model that `hf_model` asks for."""


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


def load_policy(config: Config, dtype: torch.dtype, device: torch.device) -> PolicyScorer:
    """The model of `actor_rollout_ref.model` as a policy."""
    return PolicyScorer(_load(config, config.actor_rollout_ref.model.path, dtype, device))


def load_value_function(config: Config, device: torch.device) -> ValueScorer:
    """The model of `critic.model` with a value head."""
    path = config.critic.model.path or config.actor_rollout_ref.model.path
    return ValueScorer(_load(config, path, torch.float32, device))


def _load(config: Config, path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = config.actor_rollout_ref.model
    return load_causal_lm(
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
    )


def compute_dtype(config: FSDPConfig, device: torch.device) -> Choice:
    """The dtype of the weights that compute, with its reason."""
    return choose_dtype(config.model_dtype, device)


def trained_engine(
    scorer: PolicyScorer | ValueScorer, config: ActorConfig | CriticConfig, dtype: torch.dtype, *, name: str, **options
) -> FSDPEngine:
    """The engine of a role that learns; `options` are those of the engine."""
    training = Training(config.optim, config.grad_clip, config.max_nonfinite_steps)
    return FSDPEngine(scorer, dtype=dtype, training=training, name=name, **options)


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


def save_with_tokenizer(
    engine: TrainEngine, directory: Path, contents: frozenset[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """A role's part of a checkpoint: with `model` among its contents it is a Hugging Face folder in itself.

    Every process of the role calls it; the first of those that hold the same weights writes.

    Raises:
        CheckpointError: something cannot be written.
    """
    if not engine.replicas.is_first:
        return
    folders = {directory: contents & {"model", "optimizer"}}
    if "hf_model" in contents:
        folders[directory / HF_FOLDER] = frozenset({"model"})
    try:
        for folder, parts in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            engine.save(folder, parts)
            if "model" in parts:
                tokenizer.save_pretrained(folder)
    except QuadrigaError:
        raise
    except Exception as error:
        # A full disk is an OSError to Python, a SafetensorError to safetensors, and a bare Exception to tokenizers.
        raise CheckpointError(
            str(directory), got=f"{type(error).__name__}: {error}", expected="room and permission to write it"
        ) from error
