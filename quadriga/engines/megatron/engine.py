# SPDX-License-Identifier: Apache-2.0
"""The training engine on Megatron-core, between the common loop and the common optimizer.

    loop over mini-batches       engines/step.py
    optimizer, clipping, state   engines/fsdp/engine.py, on masters with Hugging Face names
    parameters and masters       weights.py
    forward and backward         Megatron's schedules (plain, 1F1B, interleaved) and model.py

A schedule sends tensors of one shape between stages, so the micro-batches of a step are padded to
the longest one. With virtual stages their number is a multiple of the stages; the engine adds
fillers.

Legend: n packed tokens of a micro-batch on this rank, M predicted tokens, D hidden size; [V, D] the
shape of a parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.safe_globals import SAFE_GLOBALS
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    model_parallel_cuda_manual_seed,
)
from torch import nn

from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.fsdp.sharded import ReadWeight, reader_of
from quadriga.engines.megatron.cpu import REPLACED, megatron_context
from quadriga.engines.megatron.model import (
    Packed,
    build_chunks,
    linear_modules,
    loop_reason_of,
    transformer_config,
)
from quadriga.engines.megatron.weights import MegatronWeights
from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import SharedTokens
from quadriga.engines.process_group import Membership
from quadriga.errors import EngineError
from quadriga.models.attention import PackedBatch
from quadriga.models.scorers import ScoredTokens, ScoreQuestion, Scorer

# Importing Megatron allows torch to unpickle its classes from any file, in the whole process.
# Undo that.
_other_globals = [
    entry for entry in torch.serialization.get_safe_globals() if entry not in SAFE_GLOBALS
]
torch.serialization.clear_safe_globals()
torch.serialization.add_safe_globals(_other_globals)


Work = tuple[PackedBatch, LossFunction | None]
"""A micro-batch and, in training, its loss."""


class UndividedTokens(SharedTokens):
    """Token sharing without sequence parallelism: between layers, each tp rank has all tokens.

    Args:
        processes: the ranks of the engine.
        num_vocabulary: entries of the vocabulary.
    """

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        super().__init__(processes, num_vocabulary)
        self.num_parts = 1

    def select_predictors(
        self, hidden: torch.Tensor, batch: PackedBatch, *, has_sharded_head: bool
    ) -> ScoredTokens:
        """Select as `SharedTokens` does; a sharded head's gradients of `hidden` are summed over tp.

        Args:
            hidden: last hidden states [n, D] of this rank's tokens.
            batch: the packed batch.
            has_sharded_head: whether tensor parallelism shards the head.
        """
        if self.processes.layout.tp > 1 and has_sharded_head:
            # The identity, but it sums gradients: each rank scores a part of the vocabulary.
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return super().select_predictors(hidden, batch, has_sharded_head=has_sharded_head)


@dataclass(frozen=True)
class MegatronSchedule:
    """Runs micro-batches through this rank's chunks of the model with Megatron's schedules."""

    scorer: Scorer  # the model's head and its outputs
    chunks: list[GPTModel]  # one for each virtual stage
    processes: Processes
    is_interleaved: bool  # whether a rank has virtual stages

    def num_micro_batches(self, number: int) -> int:
        """Smallest number of micro-batches, at least `number`, that the schedule can run."""
        num_stages = self.processes.layout.pp
        # Every schedule needs at least one for each stage, the interleaved one multiples of that.
        if not self.is_interleaved:
            return max(number, num_stages)
        return -(-max(number, num_stages) // num_stages) * num_stages

    def run(
        self, work: Sequence[Work], question: ScoreQuestion, *, is_training: bool = False
    ) -> list[Outputs]:
        """Run a forward pass, and in training a backward pass, over all micro-batches.

        Args:
            work: micro-batches, as many as `num_micro_batches` says, with their losses in training.
            question: which outputs to compute.
            is_training: whether to run a backward pass.

        Returns:
            Outputs [M] of each micro-batch; none except in the last stage.
        """
        if self.processes.layout.pp > 1:
            longest = max(batch.num_tokens for batch, _ in work)
            work = [(batch.pad_to(longest), loss) for batch, loss in work]
        all_outputs: list[Outputs] = []

        def forward_step(
            micro_batches: Iterator[Work], chunk: nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            """Compute the next micro-batch in a chunk. Returns hidden states, and `score`."""
            # Each chunk has its own iterator over the same micro-batches.
            batch, loss = next(micro_batches)
            sharing = self.scorer.sharing
            ids, positions, plan = sharing.inputs(batch)
            routed = None
            if batch.routing is not None:
                routed = sharing.routed_tokens(batch, ids.shape[1])
            packed = Packed(positions=positions[0], plan=plan, routed=routed)
            hidden = chunk(ids, positions, None, packed_seq_params=packed)
            if routed is not None:
                self.scorer.keep_chosen_experts(routed)

            # Megatron calls this in the last stage only.
            def score(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                """Compute outputs and the loss of hidden states [n, 1, D].

                Returns what Megatron's schedules expect: the loss, a number of tokens by which they
                would normalise it, and None in place of a report.
                """
                outputs = self.scorer.score(hidden[:, 0], batch, question)
                all_outputs.append({name: values.detach() for name, values in outputs.items()})
                # Megatron needs a loss, even without a backward pass.
                zero = next(iter(outputs.values())).sum() * 0.0
                total = zero if loss is None else loss(outputs)
                # The loss is normalised already. With 0 tokens, Megatron leaves it as it is.
                return total, torch.zeros((), dtype=torch.int), None

            return hidden, score

        first_batch, _ = work[0]
        with megatron_context(self.processes.world.device):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(work) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(work),
                seq_length=first_batch.num_tokens // self.processes.layout.sp,
                micro_batch_size=1,
                forward_only=not is_training,
            )
        return all_outputs


class _Head(nn.Module):
    """Head for the scorer: Megatron's weight without the padding of its vocabulary, [V/tp, D].

    Args:
        parameter: Megatron's weight.
        num_rows: number of rows without padding.
    """

    def __init__(self, parameter: nn.Parameter, num_rows: int) -> None:
        super().__init__()
        # A tuple hides the parameter from this module, which would register it a second time.
        self._parameters_of_megatron = (parameter,)
        self._num_rows = num_rows

    @property
    def weight(self) -> torch.Tensor:
        """Rows of the vocabulary entries [V/tp, D]."""
        (parameter,) = self._parameters_of_megatron
        if len(parameter) == self._num_rows:
            return parameter
        return parameter[: self._num_rows]


class MegatronEngine(FSDPEngine):
    """A model in Megatron's modules, with its optimizer.

    Args:
        scorer: the full model and its head, with values or on "meta" with `read`.
        sequence_parallel: whether tensor-parallel ranks share the tokens between layers.
        virtual: chunks of layers in each pipeline stage (virtual stages); None for one.
        settings: fields of Megatron's TransformerConfig.
        options: further arguments of `FSDPEngine`.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        sequence_parallel: bool = True,
        virtual: int | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.virtual = virtual
        self.settings = dict(settings or {})
        has_tensor_parallelism = options["processes"].layout.tp > 1
        self.settings["sequence_parallel"] = sequence_parallel and has_tensor_parallelism
        super().__init__(scorer, **options)

    def _arrange_parameters(self, read: ReadWeight | None) -> MegatronWeights:
        """Build Megatron's modules of this rank and their weights, which replace the full model.

        Args:
            read: reads full parameters; None if the model has values.
        """
        processes = self.processes
        model = self.scorer.model
        layout = processes.layout
        sharing = SharedTokens if self.settings["sequence_parallel"] else UndividedTokens
        self.scorer.sharing = sharing(processes, model.get_input_embeddings().num_embeddings)

        is_mixture = bool(getattr(model.config, "num_experts", None))
        options: dict[str, Any] = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "expert_model_parallel_size": layout.ep if is_mixture else 1,
            "expert_tensor_parallel_size": 1,
            # With two stages, Megatron's other modes mix up the two directions in which virtual
            # stages exchange tensors.
            "overlap_p2p_comm": self.virtual is not None,
        }
        if self.memory.gradient_checkpointing:
            options |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        config = transformer_config(model.config, self.dtype, self.device, options | self.settings)

        # On a CPU, stand-ins replace CUDA during these calls.
        with megatron_context(self.device):
            form_groups(processes, self.virtual)
            chunks = build_chunks(model, config, self.device)
        weights = MegatronWeights(
            self.scorer,
            chunks,
            config,
            read or reader_of(model),
            dtype=self.dtype,
            processes=processes,
            steps_on_host=self.memory.offload_weights and self.device.type == "cuda",
        )
        if self.scorer.sharing.has_head and isinstance(model.get_output_embeddings(), nn.Linear):
            # The scorer computes log-probs with Megatron's weight of the head.
            model.set_output_embeddings(_Head(*weights.head()))
        # `FSDPEngine` runs the weights' `stage` if there is one. Here it also computes a model
        # without pipeline stages.
        schedule = MegatronSchedule(self.scorer, chunks, processes, self.virtual is not None)
        weights.root = schedule
        weights.stage = schedule
        return weights

    def describe(self) -> dict[str, Any]:
        """Describe the engine as `FSDPEngine` does, and which modules compute."""
        choices = super().describe()
        config = self.stage.chunks[0].config
        _, _, linear_reason = linear_modules(self.device)
        modules = f"the modules of Megatron-core {megatron.core.__version__}, {linear_reason}"
        if config.num_moe_experts:
            loop_reason = loop_reason_of(config, self.device)
            if loop_reason:
                modules += f"; experts one after the other ({loop_reason})"
            else:
                modules += "; experts in grouped products"
        if self.processes.layout.sp > 1:
            modules += (
                "; sequences split by heads (Ulysses), because Megatron's context parallelism "
                "needs Transformer Engine's attention, which does not support shared prompts"
            )
        if self.device.type == "cpu":
            modules += f"; on a CPU, its calls of {REPLACED} are replaced"
        return choices | {"weights": f"{choices['weights']}, in {modules}"}


_formed: dict[str, Any] = {}
"""The `sizes` of Megatron's groups in this process, and the number of the `meeting` of ranks that
formed them."""


def form_groups(processes: Processes, virtual: int | None) -> None:
    """Form Megatron's process groups, which are global: all roles of a process share them.

    Args:
        processes: the ranks of the engine.
        virtual: chunks of layers in each pipeline stage; None for one.

    Raises:
        EngineError: another role has formed them with other sizes.
    """
    layout = processes.layout
    sizes = {
        "tp": layout.tp,
        "pp": layout.pp,
        "virtual": virtual,
        "ep": layout.ep,
        "world": layout.world_size,
    }
    if parallel_state.model_parallel_is_initialized():
        if _formed["meeting"] == Membership.num_meetings:
            if _formed["sizes"] != sizes:
                raise EngineError(
                    "Megatron's groups",
                    got=str(sizes),
                    expected=str(_formed["sizes"]),
                    fix="Give all roles of a pool the same sizes under megatron.",
                )
            return
        # Torch's default group was formed anew since then, so Megatron's groups are invalid.
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        # From neighbouring ranks to distant ones, as in `Layout`.
        order="tp-cp-ep-dp-pp",
    )
    if processes.world.device.type == "cuda":
        # Megatron requires random states, although there is no dropout.
        model_parallel_cuda_manual_seed(0)
    _formed.update(sizes=sizes, meeting=Membership.num_meetings)
