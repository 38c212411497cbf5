# SPDX-License-Identifier: Apache-2.0
"""A model with its float32 masters and AdamW, on one rank or on many.

    replicated.py   every rank has all parameters and computes its own rows; gradients are summed
    sharded.py      FSDP2, with tensor, sequence and pipeline parallelism inside

Both do the same with gradients: they are clipped by their global norm, and a step updates the
masters. The loop over epochs, mini-batches and micro-batches is above the engine, in
`engines/step.py`.

Legend: M predicted tokens of a packed micro-batch; [out, in] a projection, [V, D] the embedding and
the head, r the rank of an adapter.
"""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from quadriga.config import OptimConfig
from quadriga.engines.fsdp.offload import (
    ActivationsOnHost,
    MappedFile,
    PinnedCopy,
    require_host_memory,
)
from quadriga.engines.fsdp.replicated import NamedTensors, ReplicatedWeights
from quadriga.engines.fsdp.sharded import Memory, PartialWeights, ReadWeight, ShardedWeights, shard
from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.pipeline import Stage
from quadriga.engines.parallel.processes import ONE_PROCESS, Processes
from quadriga.errors import EngineError
from quadriga.models.adapter_files import base_name, is_factor, merged
from quadriga.models.architecture import is_packed, length_limit
from quadriga.models.attention import PackedBatch
from quadriga.models.flops import model_cost
from quadriga.models.lora import adapter_of, describe_adapter
from quadriga.models.scorers import ScoreQuestion, Scorer
from quadriga.models.vision import ImageTokens, unseen_image
from quadriga.observe.machine import is_in_memory, release_free_memory

logger = logging.getLogger(__name__)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_STEPS_TO_DOUBLE = 400
# A micro-batch of this size leaves holes in a CPU's memory that the next one does not fit into.
# Returning them to the system takes milliseconds.
_LONG_TOKENS = 8192
ALL_KINDS = ("weights", "masters", "optimizer")
"""Kinds of tensors that can be offloaded."""


@dataclass(frozen=True)
class Training:
    """Settings of training."""

    optim: OptimConfig
    grad_clip: float  # the largest norm of a gradient
    max_nonfinite_steps: int  # consecutive gradients that are not finite, before an error


@dataclass(frozen=True)
class OptimizerStep:
    """Outcome of an optimizer step."""

    grad_norm: float  # before clipping
    is_applied: bool  # whether the gradient was finite


class FSDPEngine:
    """A model and its optimizer, replicated or sharded; all ranks call each method together.

    Args:
        scorer: the model and its head. Parameters are float32 and full, or on "meta" with `read`.
        dtype: compute dtype.
        device: device of the model.
        training: settings of training; None for a model that is only used for inference.
        memory: ways to save memory.
        name: role of the model, for messages.
        processes: the ranks of the engine.
        read: reads full parameters, if the scorer has no values.

    Attributes:
        replicas: ranks that compute other rows. Ranks that share the rows count as one.
        has_replicated_weights: whether `model` has full weights on this rank, so that other roles
            can compute with it.
        packs_up_to: rows of at most this many tokens may share a micro-batch; longer ones may not.
        loss_scale: [2] float64: the factor of losses (arXiv:1710.03740), a power of two, and the
            number of finite gradients since it changed. The factor is 1 except in float16, whose
            smallest number is 6e-8.
        copying: a background copy of the tensors of `state`; an optimizer step waits for it.
        resting: host memory of offloadable tensors, by kind.
        asleep: kinds that are offloaded at present.

    Raises:
        EngineError: a replica has a model with other weights.
    """

    virtual: int | None = None  # virtual pipeline stages on each rank, if any

    def __init__(
        self,
        scorer: Scorer,
        *,
        dtype: torch.dtype,
        device: torch.device,
        training: Training | None = None,
        memory: Memory | None = None,
        name: str = "actor",
        processes: Processes = ONE_PROCESS,
        read: ReadWeight | None = None,
    ) -> None:
        self.scorer = scorer
        self.dtype = dtype
        self.name = name
        self.device = device
        self.processes = processes
        self.replicas = processes.replicas
        self.world = processes.world
        self.training = training
        self.memory = memory or Memory()
        self.has_replicated_weights = processes.layout.is_whole
        self.output_names = scorer.output_names
        model = scorer.model
        self.model: PreTrainedModel = model
        self.cost = model_cost(model)
        self.image_tokens = ImageTokens.of(model.config)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.adapter = describe_adapter(model) if adapter_of(model) else ""
        self.packs_up_to: float = 0
        if is_packed(model):
            self.packs_up_to = length_limit(model.config) or math.inf
        # Tensors, which a checkpoint restores in place.
        self.num_nonfinite_steps = torch.zeros((), dtype=torch.int64)
        scale = _FIRST_SCALE if dtype == torch.float16 else 1.0
        self.loss_scale = torch.tensor([scale, 0.0], dtype=torch.float64)
        self.copying: Future[None] | None = None
        self.resting: dict[str, MappedFile | PinnedCopy] = {}
        self.asleep: set[str] = set()
        self.frees_gradients = False
        self._is_changed = False  # whether tensors changed since they were offloaded
        self.stage: Any = None

        _disable_dropout(model)
        if training is None:
            model.requires_grad_(False)
        self.parameters: ReplicatedWeights | PartialWeights = self._arrange_parameters(read)
        # Replicas that loaded other weights would stay different without any error.
        self._require_equal_replicas()
        if training is None:
            return
        self._masters = [self.parameters.masters[name] for name in self.parameters.trained]
        self.optimizer = torch.optim.AdamW(
            self._masters,
            lr=training.optim.lr,
            betas=training.optim.betas,
            eps=training.optim.eps,
            weight_decay=training.optim.weight_decay,
            fused=True,
        )
        self.activations: ActivationsOnHost | None = None
        if self.memory.activation_offload and device.type == "cuda":
            self.activations = ActivationsOnHost(scorer)
        if self.memory.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def _arrange_parameters(self, read: ReadWeight | None) -> "ReplicatedWeights | PartialWeights":
        """Replicate or shard the parameters, and set `stage` if there are pipeline stages."""
        if self.has_replicated_weights:
            steps_on_host = self.memory.offload_weights and self.device.type == "cuda"
            return ReplicatedWeights(
                self.scorer, self.model, self.dtype, self.replicas, steps_on_host=steps_on_host
            )
        weights = shard(self.scorer, read, self.dtype, self.processes, self.memory)
        if isinstance(weights.root, Stage):
            self.stage = weights.root
        return weights

    @torch.no_grad()
    def forward(self, batches: Sequence[PackedBatch], question: ScoreQuestion) -> list[Outputs]:
        """Compute outputs without gradients.

        Args:
            batches: micro-batches.
            question: which outputs to compute.

        Returns:
            Outputs [M] of each micro-batch, in order; none from a pipeline stage without the head.
        """
        self._require_awake("weights")
        work = [(batch, _zero_loss) for batch in batches]
        # Ranks that share weights gather them together, once for each micro-batch.
        if not self.has_replicated_weights:
            work = self._equal_work(work)
        outputs: list[Outputs] = []
        if self.stage is None:
            outputs = [self.scorer(batch, question) for batch, _ in work]
        elif work:
            outputs = self.stage.run([(batch, None) for batch, _ in work], question)
        if isinstance(self.parameters.root, FSDPModule):
            # Free the gathered weights, as a backward pass would.
            self.parameters.root.reshard()
        # Without those of fillers.
        return outputs[: len(batches)]

    def backward(
        self,
        batches: Sequence[PackedBatch],
        losses: Sequence[LossFunction],
        *,
        temperature: float = 1.0,
    ) -> None:
        """Compute losses, and add their gradients to those of earlier calls.

        Args:
            batches: micro-batches.
            losses: loss of each micro-batch, from its outputs [M].
            temperature: sampling temperature, which divides the logits.
        """
        self._require_awake("weights")
        question = ScoreQuestion(temperature, with_entropy=True)
        scale = float(self.loss_scale[0])
        if scale != 1.0:
            losses = [partial(_scaled_loss, loss, scale) for loss in losses]
        work = list(zip(batches, losses, strict=True))
        if not self.has_replicated_weights:
            work = self._equal_work(work)
        # Hugging Face models checkpoint layers in training mode only.
        self.model.train(self.memory.gradient_checkpointing)
        with self.activations or nullcontext():
            if self.stage is not None and work:
                self.stage.run(work, question, is_training=True)
            elif self.stage is None:
                for batch, loss in work:
                    loss(self.scorer(batch, question)).backward()
                    if self.device.type == "cpu" and batch.num_tokens >= _LONG_TOKENS:
                        release_free_memory()
        self.model.eval()

    def _equal_work(
        self, work: list[tuple[PackedBatch, LossFunction]]
    ) -> list[tuple[PackedBatch, LossFunction]]:
        """Add fillers and padding, so that all ranks run the same collectives.

        Every rank then has equally many micro-batches, whose tokens its tp and sp ranks divide.
        """
        layout = self.processes.layout
        number = max(self.replicas.gather(len(work)))
        if number and self.stage is not None:
            number = max(number, layout.pp)
            # Interleaved schedules need a multiple of the stages.
            if self.virtual is not None:
                number = -(-number // layout.pp) * layout.pp
        filler = (PackedBatch.filler(self.device), _zero_loss)
        multiple = layout.sp * layout.tp
        equal_work = []
        for batch, loss in work + [filler] * (number - len(work)):
            batch = batch.extended(-(-batch.num_tokens // multiple) * multiple)
            if self.image_tokens is not None and not batch.images:
                # All ranks gather the vision encoder if one of them has images.
                batch = replace(batch, images=unseen_image(self.model, self.device))
            equal_work.append((batch, loss))
        return equal_work

    @property
    def moment_bytes(self) -> int:
        """Memory of the optimizer's moments on the device, which is used from the first step on."""
        if self.training is None or "optimizer" in self.resting:
            return 0
        on_device = [master for master in self._masters if master.device.type == self.device.type]
        return sum(len(_MOMENTS) * master.nbytes for master in on_device)

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """Sum the gradients over all replicas, clip and apply them. Skip one that is not finite.

        Args:
            lr: learning rate.

        Returns:
            Norm of the gradient, and whether it was applied.

        Raises:
            EngineError: the last `max_nonfinite_steps` gradients were not finite.
        """
        self._require_awake("weights", "masters", "optimizer")
        weights = self.parameters
        training = self.training
        self._is_changed = True
        weights.attach_gradients()
        # Undo the loss scale before the norm is taken.
        scale = float(self.loss_scale[0])
        if scale != 1.0:
            gradients = [master.grad for master in self._masters if master.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / scale)
        norm = weights.grad_norm()
        # A background copy may still read masters and moments.
        if self.copying is not None:
            self.copying.result()
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.num_nonfinite_steps.zero_()
            torch.nn.utils.clip_grads_with_norm_(self._masters, training.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            if training.optim.master_dtype == "bfloat16":
                self._round_masters()
            weights.refresh_compute()
        elif scale == 1.0:
            # With a larger scale, the gradient may have overflowed in float16 only.
            self.num_nonfinite_steps += 1
        if self.dtype == torch.float16:
            self._set_loss_scale(is_finite=is_finite)
        if not is_finite and self.num_nonfinite_steps >= training.max_nonfinite_steps:
            raise self._nonfinite_error()
        weights.clear_gradients()
        return OptimizerStep(float(norm), is_finite)

    def _nonfinite_error(self) -> EngineError:
        weights = self.parameters
        broken = []
        for name in weights.trained:
            if not torch.isfinite(weights.masters[name].grad).all():
                broken.append(name)
        where = f"in none of the {len(weights.trained)} parameters of this process"
        if broken:
            where = f"in {len(broken)} of {len(weights.trained)} parameters, first in {broken[0]}"
        return EngineError(
            f"optimizer of the {self.name}",
            got=f"{int(self.num_nonfinite_steps)} gradients in a row that are not finite, {where}",
            expected="finite gradients",
            fix="Lower the learning rate, look for NaN in rewards, or resume from an earlier "
            "checkpoint. max_nonfinite_steps sets how many such gradients are skipped.",
        )

    def _set_loss_scale(self, *, is_finite: bool) -> None:
        """Halve the scale after a gradient that is not finite; double it after many finite ones."""
        scale, num_finite = self.loss_scale.tolist()
        if is_finite:
            num_finite += 1
            if num_finite == _STEPS_TO_DOUBLE:
                scale = min(scale * 2, _LARGEST_SCALE)
                num_finite = 0
        else:
            new_scale = max(scale / 2, 1.0)
            if self.world.is_first:
                logger.warning(
                    "optimizer of the %s: got a float16 gradient that is not finite, with losses "
                    "scaled by %g. The step is skipped; losses are now scaled by %g.",
                    self.name,
                    scale,
                    new_scale,
                )
            scale = new_scale
            num_finite = 0
        self.loss_scale.copy_(torch.tensor([scale, num_finite]))

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Round masters and moments to bfloat16, as a step in bfloat16 would."""
        for master in self._masters:
            moments = self.optimizer.state[master]
            for tensor in (master, moments["exp_avg"], moments["exp_avg_sq"]):
                tensor.copy_(tensor.bfloat16())

    def weights(self, *, is_merged: bool = True) -> NamedTensors:
        """Full parameters ([out, in], [V, D] ...) in the compute dtype, by the model's names.

        Args:
            is_merged: whether to merge an adapter into the weights that it adapts; otherwise its
                matrices are separate, as in the engine.

        Returns:
            An iterator over names and tensors.
        """
        self._require_awake("weights")
        adapter = adapter_of(self.scorer.model)
        weights = self.parameters.full_parameters()
        return merged(weights, adapter.scale) if adapter and is_merged else weights

    def adapter_weights(self, *, with_frozen: bool) -> NamedTensors:
        """Matrices A [r, in] and B [out, r] of an adapter, in the compute dtype.

        Args:
            with_frozen: whether to return the frozen weights too, under the names that they have in
                a model without an adapter.

        Returns:
            An iterator over names and tensors.
        """
        self._require_awake("weights")
        full_parameters = self.parameters.full_parameters
        weights = full_parameters() if with_frozen else full_parameters(is_factor)
        return ((base_name(name), tensor) for name, tensor in weights)

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        """Tensors of a checkpoint, in the engine's own memory; DTensors if they are sharded.

        Masters and moments have the shape of the full parameter ([out, in], [V, D] ...), numbers of
        steps are scalars.

        Args:
            contents: any of `model` (`model.NAME`, float32), `optimizer`
                (`optimizer.exp_avg.NAME`, `optimizer.exp_avg_sq.NAME`, `optimizer.step.NAME`,
                `optimizer.nonfinite_steps`, and in float16 `optimizer.loss_scale`) and, for a model
                with an adapter, `frozen` (`frozen.NAME`, in the compute dtype). `model` is then
                only the adapter, and `frozen` the rest, by the names of a model without an adapter.

        Returns:
            Tensors by name.
        """
        self._require_awake("weights", "masters", "optimizer")
        weights = self.parameters
        trained = set(weights.trained)
        has_adapter = adapter_of(self.scorer.model) is not None
        state: dict[str, torch.Tensor] = {}
        for name, master in weights.masters.items():
            full_name = weights.names[name]
            is_trained = name in trained
            # Of a model with an adapter, `model` is the adapter alone.
            if "model" in contents and (is_trained or not has_adapter):
                state[f"model.{full_name}"] = weights.distributed(name, master.detach())
            if "frozen" in contents and not is_trained:
                state[f"frozen.{base_name(full_name)}"] = weights.distributed(name, master)
            if "optimizer" in contents and is_trained:
                moments = self._moments(master)
                for kind in _MOMENTS:
                    moment = weights.distributed(name, moments[kind])
                    state[f"optimizer.{kind}.{full_name}"] = moment
                state[f"optimizer.step.{full_name}"] = moments["step"]
        # Buffers are never trained, so they are with the frozen weights if there are any.
        buffers_kind = "frozen" if has_adapter else "model"
        if buffers_kind in contents:
            for name, buffer in weights.buffers.items():
                state[f"{buffers_kind}.{name}"] = buffer
        if "optimizer" in contents:
            state["optimizer.nonfinite_steps"] = self.num_nonfinite_steps
            if self.dtype == torch.float16:
                state["optimizer.loss_scale"] = self.loss_scale
        return state

    def state_was_loaded(self, contents: frozenset[str]) -> None:
        """Update what depends on the tensors of `state`, after they were written to."""
        self._is_changed = True
        if "model" in contents:
            self.parameters.refresh_compute()
            self._require_equal_replicas()

    def _moments(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """AdamW's state of a master [...], created here before the first step."""
        moments = self.optimizer.state[master]
        if not moments:
            device = master.device if master.is_cuda else None
            moments["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for kind in _MOMENTS:
                moments[kind] = torch.zeros_like(master)
        return moments

    def rest_between_phases(
        self, kinds: Collection[str], folder: Path, *, frees_gradients: bool = False
    ) -> str:
        """From now on, offload tensors except within `awake`. Call it once, before a step.

        Args:
            kinds: any of `weights` (which compute), `masters` (if they are other tensors) and
                `optimizer`.
            folder: folder for memory-mapped files, on a CPU.
            frees_gradients: whether to free the gradient sums as well.

        Returns:
            What is offloaded, its size and where to, as the end of a sentence; "" for nothing.

        Raises:
            ConfigError: the host or the disk lacks space.
        """
        tensors = self.parameters.resting()
        if self.training is not None and "optimizer" in kinds:
            # Create the moments now, so that they never occupy the device outside of `awake`.
            tensors["optimizer"] = []
            for master in self._masters:
                moments = self._moments(master)
                tensors["optimizer"] += [moments[kind] for kind in _MOMENTS]
        is_cuda = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if is_cuda else None
        self.frees_gradients = frees_gradients
        self._is_changed = True
        offloadable: dict[str, list[torch.Tensor]] = {}
        for kind, tensors_of_kind in tensors.items():
            # With `offload_weights`, some are on the host already.
            on_device = [
                tensor for tensor in tensors_of_kind if tensor.device.type == self.device.type
            ]
            if kind in kinds and on_device:
                offloadable[kind] = on_device
        if is_cuda and kinds:
            description = f"{' and '.join(kinds)} of the {self.name}"
            require_host_memory(self.world, chain(*offloadable.values()), description)
        for kind, tensors_of_kind in offloadable.items():
            self._make_offloadable(kind, tensors_of_kind, folder, stream)
        self.sleep()
        if not self.resting:
            return ""
        where = "pinned host memory" if is_cuda else f"memory-mapped files in {folder}"
        if not is_cuda and is_in_memory(folder):
            where += ", which is itself in memory: set trainer.offload_dir to a disk"
        sizes = []
        for kind, memory in self.resting.items():
            sizes.append(f"{kind} ({memory.num_bytes / 1e6:.0f} MB)")
        return f"; {', '.join(sizes)} offloaded between phases, to {where}"

    def _make_offloadable(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        folder: Path,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Allocate host memory for tensors of a kind; on a CPU, move them there."""
        label = f"{kind} of the {self.name}"
        if stream is not None:
            self.resting[kind] = PinnedCopy(tensors, stream, label)
            return
        file = MappedFile(tensors, folder, label)
        self.resting[kind] = file
        if isinstance(self.parameters, ShardedWeights) and kind == "weights":
            # FSDP holds these as DTensors, which must be replaced themselves.
            self.parameters.use_memory(file.windows)
            return
        for tensor, window in zip(tensors, file.windows, strict=True):
            tensor.data = window

    def sleep(self) -> None:
        """Offload every offloadable tensor, and free gradient sums if `frees_gradients` is set."""
        if self.frees_gradients:
            self.parameters.sums.clear()
        if not self.resting:
            return
        if self.copying is not None:
            self.copying.result()
        for kind in self.resting.keys() - self.asleep:
            # What did not change since it was loaded need not be copied back.
            self.resting[kind].sleep(is_changed=self._is_changed)
        self._is_changed = False
        self.asleep = set(self.resting)
        release_free_memory()

    @contextmanager
    def awake(self, *kinds: str) -> Iterator[None]:
        """Context manager: load `kinds` onto the device; offload everything on exit.

        Args:
            kinds: of `ALL_KINDS`. Those that are not offloadable are there anyway.
        """
        for kind, memory in self.resting.items():
            if kind in kinds:
                memory.wake()
                self.asleep.discard(kind)
        try:
            yield
        finally:
            self.sleep()

    def _require_awake(self, *kinds: str) -> None:
        """Check that tensors are on the device, and wait for their copies."""
        asleep = self.asleep.intersection(kinds)
        if asleep:
            raise EngineError(
                f"the {self.name}",
                got=f"a call with {' and '.join(sorted(asleep))} offloaded to the host",
                expected="a call within `awake`, which loads them onto the device",
            )
        for kind in self.resting.keys() & kinds:
            self.resting[kind].wait()

    def _require_equal_replicas(self) -> None:
        if self.processes.layout.is_whole:
            parameters = list(self.scorer.model.parameters())
            self.replicas.require_alike(f"weights of the {self.name}", parameters)

    def describe(self) -> dict[str, Any]:
        """The engine's automatic choices with their reasons, for people to read."""
        dtype = str(self.dtype).removeprefix("torch.")
        weights = f"{dtype}, {'trained' if self.training is not None else 'frozen'}"
        if self.training is not None and self.dtype == torch.float16:
            weights += f", losses scaled by {float(self.loss_scale[0]):g}"
        if self.scorer.routers.count and not self.processes.layout.has_own_modules:
            implementation = self.model.config.get_text_config()._experts_implementation
            weights += f", experts by transformers' {implementation}"
        return {
            "parameters": self.num_parameters,
            "weights": weights,
            "device": str(self.device),
            "processes": self.processes.layout.describe(),
        }


def _disable_dropout(model: nn.Module) -> None:
    """Set all dropout to 0, so that a policy reproduces the log-probs of its own tokens."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
            continue
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _scaled_loss(loss: LossFunction, scale: float, outputs: Outputs) -> torch.Tensor:
    return loss(outputs) * scale


def _zero_loss(outputs: Outputs) -> torch.Tensor:
    """Loss of a filler: zero, with a zero gradient for all that was computed."""
    return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
