# SPDX-License-Identifier: Apache-2.0
"""What a step should cost: floating-point operations of a decoder, and of a vision encoder before it.

Legend: N packed tokens, D hidden size, V vocabulary, [out, in] a projection. A multiplication and an addition are two
operations.
"""

import math
import time
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone, head_of
from quadriga.models.attention import PackedBatch
from quadriga.models.experts import mixtures, router_of
from quadriga.models.vision import VisionEncoderCost


@dataclass(frozen=True)
class ModelCost:
    """What a decoder computes for a token."""

    # That multiply a token, in the layers and in the vocabulary head.
    num_block_parameters: int
    num_head_parameters: int
    attention_width: int  # of all layers and heads together
    # Those of them that have no gradient.
    num_frozen_block_parameters: int = 0
    num_frozen_head_parameters: int = 0
    vision_encoder: VisionEncoderCost | None = None  # not part of the other numbers

    @cached_property
    def attention_tokens(self) -> float:
        """The tokens of a sequence at which attention costs as much as the layers."""
        return (
            self.num_block_parameters / self.attention_width if self.attention_width else math.inf
        )

    @property
    def head(self) -> float:
        """What the vocabulary head [V, D] costs for a token, in units of the layers."""
        return self.num_head_parameters / self.num_block_parameters

    def images(self, grids: torch.Tensor) -> float:
        """What the vision encoder costs for images [I, 3] in units of the layers."""
        flops = 0.0 if self.vision_encoder is None else self.vision_encoder.update_flops(grids)
        return flops / (6 * self.num_block_parameters)

    def forward_flops(
        self, num_tokens: int, num_predicted: int, sum_of_squared_lengths: int
    ) -> float:
        """Operations of one forward pass, causal attention counted at half; a backward pass costs twice as much."""
        blocks = 2 * self.num_block_parameters * num_tokens
        head = 2 * self.num_head_parameters * num_predicted
        attention = 2 * self.attention_width * sum_of_squared_lengths
        return float(blocks + head + attention)

    def update_flops(
        self, num_tokens: int, num_predicted: int, sum_of_squared_lengths: int
    ) -> float:
        """Operations of a forward and a backward pass; a frozen matrix takes part in only half of the latter."""
        spared = (
            self.num_frozen_block_parameters * num_tokens
            + self.num_frozen_head_parameters * num_predicted
        )
        return (
            3 * self.forward_flops(num_tokens, num_predicted, sum_of_squared_lengths) - 2.0 * spared
        )

    def update_flops_of(self, packed: PackedBatch) -> float:
        """Operations of an update on a packed micro-batch of tokens [1, N], its images included."""
        flops = self.update_flops(
            packed.num_tokens, len(packed.targets), packed.sum_of_squared_lengths
        )
        if packed.images is None or self.vision_encoder is None:
            return flops
        return flops + self.vision_encoder.update_flops(packed.images.grids)


def model_cost(model: PreTrainedModel) -> ModelCost:
    """Count a model's matrix parameters [out, in]; embeddings are looked up, not multiplied. Of a layer's experts those
    count that a token goes through."""
    config, head = model.config.get_text_config(), head_of(model)
    # A matrix multiplies a token once, whatever module it is in; convolutions and states are next to nothing.
    others = {id(one.weight) for one in backbone(model).modules() if isinstance(one, nn.Embedding)}
    others |= {id(one) for mixture in mixtures(model) for one in mixture.experts.parameters()}
    matrices = [
        one for one in backbone(model).parameters() if one.dim() == 2 and id(one) not in others
    ]
    multiplied = [(one.numel(), one.requires_grad) for one in matrices]
    for mixture in mixtures(model):
        chosen = getattr(router_of(mixture), "top_k", None) or config.num_experts_per_tok
        share = chosen / mixture.experts.num_experts
        for weight in (weight for weight in mixture.experts.parameters() if weight.dim() == 3):
            multiplied.append((int(weight.numel() * share), weight.requires_grad))
    num_heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
    return ModelCost(
        num_block_parameters=sum(size for size, _ in multiplied),
        num_head_parameters=sum(one.numel() for one in head.parameters()),
        attention_width=config.num_hidden_layers * num_heads * head_size,
        num_frozen_block_parameters=sum(size for size, is_trained in multiplied if not is_trained),
        num_frozen_head_parameters=sum(
            one.numel() for one in head.parameters() if not one.requires_grad
        ),
        vision_encoder=VisionEncoderCost.of(model),
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that this device reaches on a product of square matrices, measured in a tenth of a second.

    They are [4096, 4096] on CUDA and [1024, 1024] elsewhere; on a CPU [256, 256] of float16, which most are slow at. A
    data sheet's peak is that of another machine.
    """
    is_slow = device.type == "cpu" and dtype == torch.float16
    size = 4096 if device.type == "cuda" else 256 if is_slow else 1024
    # Not random ones: a resumed run would draw from torch's generator once more than the run left alone.
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(4):
        if left.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.mm(left, right)
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            torch.mm(left, right)
            seconds = time.perf_counter() - begun
        best = max(best, 2 * size**3 / seconds)
    return best
