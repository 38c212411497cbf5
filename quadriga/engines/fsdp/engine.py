# SPDX-License-Identifier: Apache-2.0
"""A model with its float32 masters and AdamW, on one rank or on many.

    replicated.py   every rank has all parameters and computes its own rows; gradients are summed
    sharded.py      FSDP2, with tensor, sequence and pipeline parallelism inside

Both treat gradients alike: they are clipped by their global norm, and an optimizer step updates the
masters. The loop over epochs, mini-batches and micro-batches is in `engines/step.py`, above the
engine.

Legend: M predicted tokens of a packed micro-batch; [out, in] a projection, [V, D] the embedding and
the head, r the rank of an adapter.
"""

from collections.abc import Collection, Iterator, Sequence
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

from quadriga.engines.fsdp.offload import (
    ActivationsOnHost,
    MappedFile,
    PinnedCopy,
    require_host_memory,
)
from quadriga.engines.fsdp.offloaded import OffloadedTensors
from quadriga.engines.fsdp.optimizer import MOMENTS, MasterOptimizer, Training
from quadriga.engines.fsdp.replicated import NamedTensors, ReplicatedWeights
from quadriga.engines.fsdp.sharded import Memory, PartialWeights, ReadWeight, ShardedWeights, shard
from quadriga.engines.packing import LossFunction, Outputs, PackingRules
from quadriga.engines.parallel.processes import ONE_PROCESS, Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.adapter_files import base_name, is_factor, merge_adapter
from quadriga.models.attention import PackedBatch
from quadriga.models.flops import model_cost
from quadriga.models.lora import adapter_of, describe_adapter
from quadriga.models.scorers import ScoreQuestion, Scorer
from quadriga.models.vision import filler_image
from quadriga.observe.machine import release_free_memory

# On a CPU, freed memory is returned to the system after each micro-batch with at least this many
# tokens, which takes milliseconds. Otherwise the next micro-batch would need new memory beside the
# holes that this one leaves.
_LONG_TOKENS = 8192
ALL_KINDS = ("weights", "masters", "optimizer")
"""Kinds of tensors that can be offloaded."""


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
        parameters: the parameters, their masters and gradients.
        optimizer: updates the masters; only if the model is trained.
        packing: how rows may be packed for the model.
        cost: computation per token.
        num_parameters: number of parameters of the full model.
        adapter: description of the model's adapter, for people to read; "" without an adapter.
        offloaded: host memory of offloadable tensors, and the background copy of `state`, for which
            an optimizer step waits.
        activations: context manager that offloads activations; None if they stay on the device.
            Only if the model is trained.

    Raises:
        EngineError: the replicas have different weights.
    """

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
        self.training = training
        self.memory = memory or Memory()
        model = self.model
        self.packing = PackingRules.of(model)
        # Counted now, because the parameters may be shards afterwards.
        self.cost = model_cost(model)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.adapter = describe_adapter(model) if adapter_of(model) else ""
        self.offloaded = OffloadedTensors(device, name)

        _disable_dropout(model)
        if training is None:
            model.requires_grad_(False)
        self.parameters: ReplicatedWeights | PartialWeights = self._arrange_parameters(read)
        # Replicas that loaded different weights would stay different without any error.
        self._require_equal_replicas()
        if training is None:
            return
        self.optimizer = MasterOptimizer(
            self.parameters, training, dtype, name=name, is_first_rank=self.world.is_first
        )
        self.activations: ActivationsOnHost | None = None
        if self.memory.activation_offload and device.type == "cuda":
            self.activations = ActivationsOnHost(scorer)
        if self.memory.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self.scorer.model

    @property
    def replicas(self) -> ProcessGroup:
        """Data-parallel ranks. Ranks that compute the same rows count as one."""
        return self.processes.replicas

    @property
    def world(self) -> ProcessGroup:
        """All ranks of the engine."""
        return self.processes.world

    @property
    def stage(self) -> Any:
        """Object that runs micro-batches instead of the scorer, such as a pipeline stage, or None."""
        return self.parameters.stage

    @property
    def loss_scale(self) -> torch.Tensor:
        """[2] float64: factor of losses, and number of finite gradients since it changed."""
        return self.optimizer.loss_scale

    @property
    def host_memory(self) -> dict[str, MappedFile | PinnedCopy]:
        """Host memory of offloadable tensors, by kind."""
        return self.offloaded.memory

    def _arrange_parameters(self, read: ReadWeight | None) -> "ReplicatedWeights | PartialWeights":
        """Replicate or shard the parameters."""
        if not self.processes.layout.is_whole:
            return shard(self.scorer, read, self.dtype, self.processes, self.memory)
        steps_on_host = self.memory.offload_weights and self.device.type == "cuda"
        return ReplicatedWeights(
            self.scorer, self.model, self.dtype, self.replicas, steps_on_host=steps_on_host
        )

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
        # `_equalize_work` takes a loss per micro-batch. No loss is called here.
        work = [(batch, _zero_loss) for batch in batches]
        # Ranks that share weights gather them together, once for each micro-batch.
        if isinstance(self.parameters, PartialWeights):
            work = self._equalize_work(work)
        outputs = []
        if self.stage is None:
            outputs = [self.scorer(batch, question) for batch, _ in work]
        elif work:
            outputs = self.stage.run([(batch, None) for batch, _ in work], question)
        if isinstance(self.parameters.root, FSDPModule):
            # Free the gathered weights, as a backward pass would.
            self.parameters.root.reshard()
        # Drop the outputs of the fillers that `_equalize_work` has appended.
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
        scale = float(self.optimizer.loss_scale[0])
        if scale != 1.0:
            losses = [partial(_scaled_loss, loss, scale) for loss in losses]
        work = list(zip(batches, losses, strict=True))
        if isinstance(self.parameters, PartialWeights):
            work = self._equalize_work(work)

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

    def _equalize_work(
        self, work: list[tuple[PackedBatch, LossFunction]]
    ) -> list[tuple[PackedBatch, LossFunction]]:
        """Add micro-batches and padding, so that all ranks run the same collectives.

        Args:
            work: micro-batches of this rank with their losses.

        Returns:
            The same number of micro-batches on every rank: first `work`, then fillers with a loss
            of zero. Each is padded to a number of tokens that the tp and sp ranks can divide.
        """
        layout = self.processes.layout
        num_batches = max(self.replicas.gather(len(work)))
        if num_batches and self.stage is not None:
            num_batches = self.stage.num_micro_batches(num_batches)
        filler = (PackedBatch.filler(self.device), _zero_loss)
        divisor = layout.sp * layout.tp
        equal_work = []
        for batch, loss in work + [filler] * (num_batches - len(work)):
            batch = batch.pad_to(-(-batch.num_tokens // divisor) * divisor)
            if self.packing.image_tokens is not None and not batch.images:
                # Another rank may have images. Ranks that share the weights of the vision encoder
                # must gather them together, so this rank encodes an image, too.
                batch = replace(batch, images=filler_image(self.model, self.device))
            equal_work.append((batch, loss))
        return equal_work

    @property
    def moment_bytes(self) -> int:
        """Bytes on the device that the first optimizer step will allocate for the moments.

        0 for a frozen model, and for moments that are offloaded, which have their memory already.
        """
        if self.training is None or "optimizer" in self.host_memory:
            return 0
        masters = self.optimizer.masters
        on_device = [master for master in masters if master.device.type == self.device.type]
        return len(MOMENTS) * sum(master.nbytes for master in on_device)

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """Sum the gradients over all replicas, clip and apply them.

        Gradients are dropped instead of applied if one of them is not finite.

        Args:
            lr: learning rate.

        Returns:
            Norm of the gradient before clipping, and whether the gradient was applied.

        Raises:
            EngineError: the last `max_nonfinite_steps` gradients were not finite.
        """
        self._require_awake(*ALL_KINDS)
        self.offloaded.is_changed = True
        self.parameters.attach_gradients()
        norm = self.optimizer.unscaled_norm()
        # A background copy may still read masters and moments.
        self.offloaded.await_copy()
        is_applied = self.optimizer.apply(norm, lr)
        self.parameters.clear_gradients()
        return OptimizerStep(float(norm), is_applied)

    def weights(self, *, is_merged: bool = True) -> NamedTensors:
        """Full parameters ([out, in], [V, D] ...) in the compute dtype, by the model's names.

        Args:
            is_merged: whether to merge an adapter into the weights that it adapts; otherwise its
                matrices are separate, as in the engine.

        Returns:
            An iterator over names and tensors.
        """
        self._require_awake("weights")
        adapter = adapter_of(self.model)
        weights = self.parameters.full_parameters()
        return merge_adapter(weights, adapter.scale) if adapter and is_merged else weights

    def adapter_weights(self, *, with_frozen: bool) -> NamedTensors:
        """Matrices A [r, in] and B [out, r] of an adapter, in the compute dtype.

        Args:
            with_frozen: whether to return the frozen weights too, under their names in a model
                without an adapter.

        Returns:
            An iterator over names and tensors.
        """
        self._require_awake("weights")
        full_parameters = self.parameters.full_parameters
        weights = full_parameters() if with_frozen else full_parameters(is_factor)
        return ((base_name(name), tensor) for name, tensor in weights)

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, not copied; DTensors if they are sharded.

        Masters and moments have the shape of the full parameter ([out, in], [V, D] ...); numbers of
        steps are scalars.

        Args:
            contents: any of `model` (`model.NAME`, float32), `optimizer`
                (`optimizer.exp_avg.NAME`, `optimizer.exp_avg_sq.NAME`, `optimizer.step.NAME`,
                `optimizer.nonfinite_steps`, and in float16 `optimizer.loss_scale`) and, for a model
                with an adapter, `frozen` (`frozen.NAME`, in the compute dtype). `model` is then the
                adapter alone, and `frozen` has the other weights, by their names in a model without
                an adapter.

        Returns:
            Tensors by name.
        """
        self._require_awake(*ALL_KINDS)
        weights = self.parameters
        trained = set(weights.trained)
        has_adapter = adapter_of(self.model) is not None
        state = {}
        for name, master in weights.masters.items():
            full_name = weights.names[name]
            is_trained = name in trained
            # With an adapter, the model's own weights are in `frozen`.
            if "model" in contents and (is_trained or not has_adapter):
                state[f"model.{full_name}"] = weights.as_dtensor(name, master.detach())
            if "frozen" in contents and not is_trained:
                state[f"frozen.{base_name(full_name)}"] = weights.as_dtensor(name, master)
            if "optimizer" in contents and is_trained:
                moments = self.optimizer.moments(master)
                for kind in MOMENTS:
                    moment = weights.as_dtensor(name, moments[kind])
                    state[f"optimizer.{kind}.{full_name}"] = moment
                state[f"optimizer.step.{full_name}"] = moments["step"]
        # Buffers are never trained, so with an adapter they belong to the frozen weights.
        buffers_kind = "frozen" if has_adapter else "model"
        if buffers_kind in contents:
            for name, buffer in weights.buffers.items():
                state[f"{buffers_kind}.{name}"] = buffer
        if "optimizer" in contents:
            state["optimizer.nonfinite_steps"] = self.optimizer.num_nonfinite_steps
            if self.dtype == torch.float16:
                state["optimizer.loss_scale"] = self.loss_scale
        return state

    def apply_loaded_state(self, contents: frozenset[str]) -> None:
        """Take over a state that was loaded into the tensors of `state`.

        If the model was loaded, the compute parameters become copies of the new masters.

        Args:
            contents: the loaded parts of the state; see `state`.

        Raises:
            EngineError: the replicas have different weights.
        """
        self.offloaded.is_changed = True
        if "model" in contents:
            self.parameters.refresh_compute()
            self._require_equal_replicas()

    def offload_between_phases(
        self, kinds: Collection[str], folder: Path, *, frees_gradients: bool = False
    ) -> str:
        """Offload tensors now, and at each exit from `awake`. Call it once, before the first step.

        Args:
            kinds: any of `weights` (the compute parameters), `masters` (if they are separate
                tensors) and `optimizer`.
            folder: folder for memory-mapped files, on a CPU.
            frees_gradients: whether to free the gradient sums as well.

        Returns:
            Kinds, sizes and destination of the offloaded tensors, to be appended to a sentence; ""
            if nothing is offloaded.

        Raises:
            ConfigError: the host or the disk lacks space.
        """
        tensors = self.parameters.offloadable_tensors()
        if self.training is not None and "optimizer" in kinds:
            # Create the moments now, so that they never occupy the device outside of `awake`.
            tensors["optimizer"] = self.optimizer.all_moments()
        self.offloaded.frees_gradients = frees_gradients
        self.offloaded.is_changed = True

        offloadable = {}
        for kind, tensors_of_kind in tensors.items():
            # With `offload_weights`, some are on the host already.
            on_device = [
                tensor for tensor in tensors_of_kind if tensor.device.type == self.device.type
            ]
            if kind in kinds and on_device:
                offloadable[kind] = on_device

        if self.device.type == "cuda" and kinds:
            require_host_memory(
                self.world,
                chain(*offloadable.values()),
                f"{' and '.join(kinds)} of the {self.name}",
            )
        for kind, on_device in offloadable.items():
            # On a CPU, tensors move into the copies. On a GPU, there are no copies to take over.
            copies = self.offloaded.add(kind, on_device, folder)
            if copies and isinstance(self.parameters, ShardedWeights) and kind == "weights":
                # FSDP holds these as DTensors, which must be replaced themselves.
                self.parameters.replace_memory(copies)
                continue
            for tensor, copy in zip(on_device, copies, strict=False):
                tensor.data = copy
        self.sleep()
        return self.offloaded.describe(folder)

    def sleep(self) -> None:
        """Offload every offloadable tensor, and free gradient sums if `frees_gradients` was set."""
        if self.offloaded.frees_gradients:
            self.parameters.sums.clear()
        self.offloaded.sleep()

    @contextmanager
    def awake(self, *kinds: str) -> Iterator[None]:
        """Context manager: load `kinds` onto the device; offload everything on exit.

        Args:
            kinds: any of `ALL_KINDS`. Kinds that are not offloaded are on the device anyway.
        """
        if self.offloaded.memory:
            self.offloaded.wake(kinds)
        try:
            yield
        finally:
            self.sleep()

    def _require_awake(self, *kinds: str) -> None:
        """Check that kinds of tensors are not offloaded, and wait until they are on the device."""
        if self.offloaded.memory:
            self.offloaded.wait(kinds)

    def _require_equal_replicas(self) -> None:
        """Check that weights which all ranks hold in full are the same on all ranks."""
        if self.processes.layout.is_whole:
            parameters = list(self.model.parameters())
            self.replicas.require_alike(f"weights of the {self.name}", parameters)

    def describe(self) -> dict[str, Any]:
        """Describe the model and the engine's automatic choices, for people to read."""
        dtype = str(self.dtype).removeprefix("torch.")
        weights = f"{dtype}, {'trained' if self.training is not None else 'frozen'}"
        if self.training is not None and self.dtype == torch.float16:
            weights += f", losses scaled by {float(self.loss_scale[0]):g}"
        # Transformers chooses how it computes experts. Megatron's modules have no such choice.
        if self.scorer.routers.count and not self.processes.layout.uses_megatron_modules:
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
        # Attention modules pass a number such as `attention_dropout` to a function.
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _scaled_loss(loss: LossFunction, scale: float, outputs: Outputs) -> torch.Tensor:
    """Multiply a loss, so that small gradients do not become 0 in float16."""
    return loss(outputs) * scale


def _zero_loss(outputs: Outputs) -> torch.Tensor:
    """Loss of a filler: zero, with a zero gradient for everything that was computed."""
    return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
