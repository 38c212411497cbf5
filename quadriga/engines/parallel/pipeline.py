# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass from one to the next.

    stage 0        embedding, layers 0-3     hidden states  --->          and the vision encoder
    stage 1                   layers 4-7, norm, head: outputs and loss; gradients of hidden states  <---

The schedules are torch's: one forward, one backward (arXiv:2104.04473) for training; forward only for inference. They
want tensors of one shape, so the micro-batches of a step are extended to the longest of them. A stage keeps the model
whole in name: layers of other stages pass on what they get, so that the architecture's own forward runs.

Legend: n packed tokens of a micro-batch in this rank, D hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.processes import Processes
from quadriga.errors import EngineError
from quadriga.models.architecture import backbone
from quadriga.models.attention import PackedBatch
from quadriga.models.scorers import Question, Scorer
from quadriga.models.vision import is_vision


class _PassOn(nn.Module):
    """A layer of another stage. It keeps the plain attributes that architectures read of their layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, n, D], as it came."""
        return hidden


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a stage: even shares, one more in the first stages where they do not come out even."""
    share, rest = divmod(num_layers, num_stages)
    start = stage * share + min(stage, rest)
    return range(start, start + share + (stage < rest))


def keep_stage(model: PreTrainedModel, processes: Processes) -> Mapping[str, str]:
    """Take out of a model what other stages have. Returns names here -> names in the whole model, of parameters that
    the first and the last stage both have: the head's weight where it is the embedding's.
    Raises EngineError: the architecture has not the parts that are to be taken out."""
    base = backbone(model)
    for part in ("layers", "norm"):
        if not hasattr(base, part):
            got, expected = (
                f"a backbone without `{part}`",
                "embedding, layers and norm, as in the Llama family",
            )
            fix = "Set pipeline_model_parallel_size=1."
            raise EngineError(
                f"pipeline parallelism of {type(model).__name__}",
                got=got,
                expected=expected,
                fix=fix,
            )
    layers = cast(nn.ModuleList, base.layers)
    own = layers_of_stage(len(layers), processes.place.pp, processes.layout.pp)
    for number, layer in enumerate(layers):
        if number not in own:
            layers[number] = _PassOn(layer)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    tied = {f"{names[id(head)]}.weight": f"{names[id(table)]}.weight"} if is_tied else {}
    if not processes.is_last_stage:
        base.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
        if hasattr(model, "value_head"):
            model.value_head = nn.Identity()
    if not processes.is_first_stage:
        # What the first stage has multiplied its embeddings with.
        for name in ("embedding_multiplier", "embedding_scale"):
            if hasattr(base, name):
                setattr(base, name, 1.0)
        model.set_input_embeddings(nn.Identity())
        if is_vision(model.config):
            cast(Any, model.base_model).visual = nn.Identity()
    return tied if processes.is_last_stage and not processes.is_first_stage else {}


class Stage(nn.Module):
    """The module of one stage, sharded or not, as torch's schedules call it: with the number of a micro-batch."""

    def __init__(self, scorer: Scorer, processes: Processes, dtype: torch.dtype) -> None:
        super().__init__()
        self.scorer, self.processes, self.dtype = scorer, processes, dtype
        self.work: Sequence[tuple[PackedBatch, LossFunction | None]] = ()
        self.question = Question()
        self.outputs: list[Outputs] = []

    def forward(self, received: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """[1, n, D] for the next stage; from the last one the loss [1]."""
        batch, loss = self.work[int(number)]
        sharing = self.scorer.sharing
        outputs = self.scorer(
            batch, self.question, received=None if sharing.has_embedding else received
        )
        if not sharing.has_head:
            return outputs
        self.outputs.append({name: values.detach() for name, values in outputs.items()})
        return (
            next(iter(outputs.values())).new_zeros(1)
            if loss is None
            else torch.stack([loss(outputs)])
        )  # no view

    def run(
        self,
        work: Sequence[tuple[PackedBatch, LossFunction | None]],
        question: Question,
        *,
        is_training: bool = False,
    ) -> list[Outputs]:
        """One forward pass, and in training one backward pass, over all micro-batches, at least as many as stages, each
        with its loss in training. Returns the outputs [M] of each micro-batch; none but in the last stage."""
        # A quarter of a second to import, which runs without pipeline stages save.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        longest = max(batch.num_tokens for batch, _ in work)
        self.work = [(batch.extended(longest), loss) for batch, loss in work]
        self.question, self.outputs = question, []
        layout, place, is_last = (
            self.processes.layout,
            self.processes.place,
            self.processes.is_last_stage,
        )
        device = self.processes.world.device
        numbers = torch.arange(len(work))  # on the host, where they are read
        size = self.scorer.model.config.get_text_config().hidden_size
        shape = (1, longest // (layout.sp * layout.tp), size)
        hidden = torch.empty(shape, dtype=self.dtype, device=device, requires_grad=is_training)
        loss = torch.empty(1, device=device, requires_grad=is_training)
        stage = PipelineStage(
            self,
            place.pp,
            layout.pp,
            device,
            input_args=numbers[:1] if place.pp == 0 else hidden,
            output_args=loss if is_last else hidden,
            group=self.processes.group("pp"),
        )
        if is_training:
            # The last stage returns losses already.
            schedule: Any = Schedule1F1B(
                stage, len(work), lambda loss, number: loss.sum(), scale_grads=False
            )
        else:
            schedule = ScheduleGPipe(stage, len(work), None)
        targets = {"target": numbers} if is_training and is_last else {}
        schedule.step(*([numbers] if place.pp == 0 else []), number=numbers, **targets)
        return self.outputs
