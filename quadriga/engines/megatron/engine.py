# SPDX-License-Identifier: Apache-2.0
"""The training engine on Megatron-core: its modules and schedules between the loop and the optimizer of every engine.

    loop over mini-batches       engines/step.py
    optimizer, clipping, state   engines/fsdp/engine.py, on masters under Hugging Face's names (weights.py)
    forward and backward         Megatron's schedules (plain, 1F1B, interleaved) and GPTModel (model.py)

A schedule sends tensors of one shape between stages, so the micro-batches of a step are extended to the longest. With
virtual stages their number is a multiple of the stages; the engine adds fillers.

Legend: n packed tokens of a micro-batch in this rank, M predicted ones, D hidden size; [V, D] a parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from quadriga.engines.fsdp.sharded import ReadWeight
from quadriga.engines.megatron.cpu import REPLACED, around_megatron
from quadriga.engines.megatron.model import (
    Packed,
    chunks_of,
    linear_modules,
    transformer_config,
    why_in_a_loop,
)
from quadriga.engines.megatron.weights import MegatronWeights
from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import SharedTokens
from quadriga.engines.process_group import Membership
from quadriga.errors import EngineError
from quadriga.models.attention import PackedBatch
from quadriga.models.scorers import Question, Scored, Scorer

# With its import torch would unpickle these classes from any file, in the whole process.
_others = [one for one in torch.serialization.get_safe_globals() if one not in SAFE_GLOBALS]
torch.serialization.clear_safe_globals()
torch.serialization.add_safe_globals(_others)


Work = tuple[PackedBatch, LossFunction | None]


class WholeTokens(SharedTokens):
    """Every rank of a tensor-parallel group has all tokens at the end: Megatron without sequence parallelism."""

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        super().__init__(processes, num_vocabulary)
        self.num_parts = 1

    def scored(self, hidden: torch.Tensor, batch: PackedBatch, *, in_parts: bool) -> Scored:
        if self.processes.layout.tp > 1 and in_parts:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return super().scored(hidden, batch, in_parts=in_parts)


class Schedule:
    """This rank's chunks, and how micro-batches go through them."""

    def __init__(self, scorer: Scorer, chunks: Sequence[GPTModel], processes: Processes) -> None:
        self.scorer, self.chunks, self.processes = scorer, list(chunks), processes

    def run(
        self, work: Sequence[Work], question: Question, *, is_training: bool = False
    ) -> list[Outputs]:
        """One forward pass, and in training one backward pass, over all micro-batches, in multiples of the stages, each
        with its loss in training. Returns the outputs [M] of each micro-batch; none but in the last stage."""
        if self.processes.layout.pp > 1:
            longest = max(batch.num_tokens for batch, _ in work)
            work = [(batch.extended(longest), loss) for batch, loss in work]
        found: list[Outputs] = []

        def step(
            pieces: Iterator[Work], chunk: nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            batch, loss = next(pieces)
            ids, positions, plan = self.scorer.sharing.inputs(batch)
            routed = (
                None if batch.routing is None else self.scorer.sharing.routed(batch, ids.shape[1])
            )
            packed = Packed(positions=positions[0], plan=plan, routed=routed)
            hidden = chunk(ids, positions, None, packed_seq_params=packed)
            if routed is not None:
                self.scorer.keep_routes(routed)

            def score(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                outputs = self.scorer.score(hidden[:, 0], batch, question)
                found.append({name: values.detach() for name, values in outputs.items()})
                total = next(iter(outputs.values())).sum() * 0.0 if loss is None else loss(outputs)
                return total, torch.zeros((), dtype=torch.int), None

            return hidden, score

        with around_megatron(self.processes.world.device):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(work) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(work),
                seq_length=work[0][0].num_tokens // self.processes.layout.sp,
                micro_batch_size=1,
                forward_only=not is_training,
            )
        return found


class _Head(nn.Module):
    """The rows [V/tp, D] of Megatron's head that are in the vocabulary."""

    def __init__(self, parameter: nn.Parameter, rows: int) -> None:
        super().__init__()
        self._whole, self._rows = (parameter,), rows

    @property
    def weight(self) -> torch.Tensor:
        (whole,) = self._whole
        return whole if len(whole) == self._rows else whole[: self._rows]


class MegatronEngine(FSDPEngine):
    """A model, whole, on "meta" with `read` or with values, in Megatron's modules, and its optimizer. `virtual`: chunks
    of layers in each pipeline stage; None: one. `settings`: fields of Megatron's TransformerConfig."""

    def __init__(
        self,
        scorer: Scorer,
        *,
        sequence_parallel: bool = True,
        virtual: int | None = None,
        settings: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        self.virtual, self.settings = virtual, dict(settings or {})
        self.settings["sequence_parallel"] = sequence_parallel and rest["processes"].layout.tp > 1
        super().__init__(scorer, **rest)

    def _arranged(self, read: ReadWeight | None) -> MegatronWeights:
        processes, model, layout = self.processes, self.scorer.model, self.processes.layout
        if read is None:
            values = {name: parameter.detach() for name, parameter in model.named_parameters()}
            read = values.__getitem__
        kind = SharedTokens if self.settings["sequence_parallel"] else WholeTokens
        self.scorer.sharing = kind(processes, model.get_input_embeddings().num_embeddings)
        is_mixture = getattr(model.config, "num_experts", None)
        sizes = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "expert_model_parallel_size": layout.ep if is_mixture else 1,
            "expert_tensor_parallel_size": 1,
            # With two stages Megatron's other ways mix up the directions of virtual ones.
            "overlap_p2p_comm": self.virtual is not None,
        }
        if self.memory.gradient_checkpointing:
            sizes |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        config = transformer_config(model.config, self.dtype, self.device, sizes | self.settings)
        with around_megatron(self.device):
            meet(processes, self.virtual)
            chunks = chunks_of(model, config, self.device)
        on_host = self.memory.offload_weights and self.device.type == "cuda"
        how = {"dtype": self.dtype, "processes": processes, "steps_on_host": on_host}
        weights = MegatronWeights(self.scorer, chunks, config, read, **how)
        if self.scorer.sharing.has_head and isinstance(model.get_output_embeddings(), nn.Linear):
            model.set_output_embeddings(_Head(*weights.head()))
        self.stage = weights.root = Schedule(self.scorer, chunks, processes)
        return weights

    def describe(self) -> dict[str, Any]:
        chosen = super().describe()
        config, layout = self.stage.chunks[0].config, self.processes.layout
        how = f"the modules of Megatron-core {megatron.core.__version__}, {linear_modules(self.device)[2]}"
        if config.num_moe_experts:
            reason = why_in_a_loop(config, self.device)
            how += (
                f"; experts one after the other ({reason})"
                if reason
                else "; experts in grouped products"
            )
        if layout.sp > 1:
            how += "; sequences split by heads (Ulysses), for Megatron's context parallelism is in Transformer Engine's"
            how += " attention, which knows no shared prompts"
        if self.device.type == "cpu":
            how += f"; on a CPU its calls of {REPLACED} are answered in place"
        return chosen | {"weights": f"{chosen['weights']}, in {how}"}


_met: dict[
    str, Any
] = {}  # the sizes with which Megatron's groups were made in this process, and in which meeting


def meet(processes: Processes, virtual: int | None) -> None:
    """Form Megatron's groups, which are global in a process; roles that share it share them.
    Raises EngineError: they were formed with other sizes."""
    layout = processes.layout
    sizes = {
        "tp": layout.tp,
        "pp": layout.pp,
        "virtual": virtual,
        "ep": layout.ep,
        "world": layout.world_size,
    }
    if (
        parallel_state.model_parallel_is_initialized()
        and _met["meeting"] == Membership.num_meetings
    ):
        if _met["sizes"] != sizes:
            fix = "Give all roles of a pool the same sizes under megatron."
            raise EngineError(
                "Megatron's groups", got=str(sizes), expected=str(_met["sizes"]), fix=fix
            )
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp",
    )
    if processes.world.device.type == "cuda":
        # There is no dropout; Megatron wants its random states all the same.
        model_parallel_cuda_manual_seed(0)
    _met.update(sizes=sizes, meeting=Membership.num_meetings)
