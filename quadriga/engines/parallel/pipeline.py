# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: each rank has some of the layers; micro-batches pass from rank to rank.

    stage 0     embedding, vision encoder, layers 0-3   --->   hidden states
    stage 1     layers 4-7, norm, head, loss            <---   gradients of hidden states

The schedules are torch's: 1F1B (arXiv:2104.04473) for training, forward passes only for inference.
They need tensors of one shape, so the micro-batches of a step are padded to the longest one. The
model keeps its structure, so that the architecture's own forward pass runs: layers of other stages
are replaced by modules that return their input.

Legend: n packed tokens of a micro-batch on this rank, M predicted tokens, D hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.processes import Processes
from quadriga.errors import EngineError
from quadriga.models.architecture import backbone
from quadriga.models.attention import PackedBatch
from quadriga.models.scorers import ScoreQuestion, Scorer
from quadriga.models.vision import is_vision


class _PassThrough(nn.Module):
    """Takes the place of a layer of another stage, and returns hidden states unchanged.

    It has the layer's attributes that are strings or numbers, because models read some of them.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [1, n, D] unchanged."""
        return hidden


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Find the layers of one stage. Stages get equal numbers, or the first ones get one more.

    Args:
        num_layers: layers of the model.
        stage: the stage.
        num_stages: number of stages.

    Returns:
        Numbers of the layers.
    """
    share, remainder = divmod(num_layers, num_stages)
    # First layers of this stage and of the next one.
    bounds = [number * share + min(number, remainder) for number in (stage, stage + 1)]
    return range(*bounds)


def keep_stage(model: PreTrainedModel, processes: Processes) -> Mapping[str, str]:
    """Remove the modules of other stages from a model.

    Args:
        model: the model, changed in place.
        processes: the ranks of the engine.

    Returns:
        In the last stage, if the head is tied to the embedding, which the first stage has: the name
        of the head's weight, mapped to the name of the embedding's weight. Otherwise empty.

    Raises:
        EngineError: the backbone does not have its layers and norm under these names.
    """
    base: Any = backbone(model)
    for attribute in ("layers", "norm"):
        if not hasattr(base, attribute):
            raise EngineError(
                f"pipeline parallelism of {type(model).__name__}",
                got=f"a backbone without `{attribute}`",
                expected="embedding, layers and norm, as in the Llama family",
                fix="Set pipeline_model_parallel_size=1.",
            )
    local_layers = layers_of_stage(len(base.layers), processes.place.pp, processes.layout.pp)
    for number, layer in enumerate(base.layers):
        if number not in local_layers:
            base.layers[number] = _PassThrough(layer)

    # Find tied weights before the embedding is removed.
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied_names = {}
    if isinstance(head, nn.Linear) and head.weight is table.weight:
        paths = {id(module): name for name, module in model.named_modules()}
        tied_names[f"{paths[id(head)]}.weight"] = f"{paths[id(table)]}.weight"

    if not processes.is_last_stage:
        base.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
        if hasattr(model, "value_head"):
            model.value_head = nn.Identity()
    if processes.is_first_stage:
        return {}
    # The first stage has already scaled its embeddings.
    for name in ("embedding_multiplier", "embedding_scale"):
        if hasattr(base, name):
            setattr(base, name, 1.0)
    model.set_input_embeddings(nn.Identity())
    if is_vision(model.config):
        model.base_model.visual = nn.Identity()
    return tied_names if processes.is_last_stage else {}


class Stage(nn.Module):
    """Module of one stage, called by torch's schedules with the number of a micro-batch.

    Args:
        scorer: the model of this stage, and the head.
        processes: the ranks of the engine.
        dtype: dtype of hidden states.
    """

    def __init__(self, scorer: Scorer, processes: Processes, dtype: torch.dtype) -> None:
        super().__init__()
        self.scorer = scorer
        self.processes = processes
        self.dtype = dtype
        # Arguments and results of the current call of `run`.
        self.work: Sequence[tuple[PackedBatch, LossFunction | None]] = ()
        self.question = ScoreQuestion()
        self.outputs: list[Outputs] = []

    def forward(self, received: Tensor, *, number: Tensor) -> Tensor:
        """Compute one micro-batch in this stage.

        Args:
            received: [1, n, D] from the previous stage; ignored in the first one.
            number: [1] int64, which micro-batch.

        Returns:
            [1, n, D] for the next stage; the loss [1] in the last one.
        """
        batch, loss = self.work[int(number)]
        sharing = self.scorer.sharing
        hidden = None if sharing.has_embedding else received
        outputs = self.scorer(batch, self.question, received=hidden)
        if not sharing.has_head:
            return outputs
        self.outputs.append({name: values.detach() for name, values in outputs.items()})
        if loss is None:
            return next(iter(outputs.values())).new_zeros(1)
        return torch.stack([loss(outputs)])  # not a view, which the schedule refuses

    def num_micro_batches(self, number: int) -> int:
        """Smallest number of micro-batches, at least `number`, for the schedules: one per stage."""
        return max(number, self.processes.layout.pp)

    def run(
        self,
        work: Sequence[tuple[PackedBatch, LossFunction | None]],
        question: ScoreQuestion,
        *,
        is_training: bool = False,
    ) -> list[Outputs]:
        """Run a forward pass, and in training a backward pass, over all micro-batches.

        Args:
            work: micro-batches, at least as many as stages, with their losses in training. All are
                padded to the longest one.
            question: which outputs to compute.
            is_training: whether to run a backward pass.

        Returns:
            Outputs [M] of each micro-batch; none except in the last stage.
        """
        # Imported here, because it takes a quarter of a second, and only pipelines need it.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        longest = max(batch.num_tokens for batch, _ in work)
        self.work = [(batch.pad_to(longest), loss) for batch, loss in work]
        self.question = question
        self.outputs = []
        layout = self.processes.layout
        is_first = self.processes.is_first_stage
        is_last = self.processes.is_last_stage
        device = self.processes.world.device
        numbers = torch.arange(len(work))  # on the host, where they are read

        # Tensors with the shapes and dtypes of what the stages exchange.
        hidden_size = self.scorer.model.config.get_text_config().hidden_size
        shape = (1, longest // (layout.sp * layout.tp), hidden_size)
        hidden = torch.empty(shape, dtype=self.dtype, device=device, requires_grad=is_training)
        loss = torch.empty(1, device=device, requires_grad=is_training)
        stage = PipelineStage(
            self,
            self.processes.place.pp,
            layout.pp,
            device,
            input_args=numbers[:1] if is_first else hidden,
            output_args=loss if is_last else hidden,
            group=self.processes.group("pp"),
        )

        inputs = [numbers] if is_first else []
        if not is_training:
            ScheduleGPipe(stage, len(work), None).step(*inputs, number=numbers)
            return self.outputs
        # The loss function only sums: the last stage's outputs are losses already. They are
        # normalised, so the schedule must not divide gradients by the number of micro-batches.
        schedule = Schedule1F1B(
            stage, len(work), lambda loss, number: loss.sum(), scale_grads=False
        )
        # The schedule needs a target for each micro-batch, which the loss function ignores.
        targets = {"target": numbers} if is_last else {}
        schedule.step(*inputs, number=numbers, **targets)
        return self.outputs
