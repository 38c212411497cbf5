# SPDX-License-Identifier: Apache-2.0
"""Expected cost of a step: floating-point operations of a decoder and its vision encoder.

A multiplication and an addition count as two operations.

Legend: N packed tokens, I images, D hidden size, V vocabulary, [out, in] a projection.
"""

import math
import time
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone, head_of
from quadriga.models.attention import PackedBatch
from quadriga.models.experts import mixtures, router_of
from quadriga.models.vision import VisionEncoderCost


@dataclass(frozen=True)
class ModelCost:
    """Size of a decoder, and the operations that it needs for tokens.

    Attributes:
        num_block_parameters: number of parameters in the layers that multiply a token.
        num_head_parameters: number of parameters in the vocabulary head.
        attention_width: size of all heads of all layers together.
        num_frozen_block_parameters: how many of `num_block_parameters` are not trained.
        num_frozen_head_parameters: how many of `num_head_parameters` are not trained.
        vision_encoder: cost of a vision encoder, which the other numbers do not include. None: a
            text model.
    """

    num_block_parameters: int
    num_head_parameters: int
    attention_width: int
    num_frozen_block_parameters: int = 0
    num_frozen_head_parameters: int = 0
    vision_encoder: VisionEncoderCost | None = None

    @cached_property
    def attention_tokens(self) -> float:
        """Sequence length in tokens at which attention costs as much as the matrices of the layers.

        Infinite for a model without attention.
        """
        if not self.attention_width:
            return math.inf
        return self.num_block_parameters / self.attention_width

    @property
    def head_cost(self) -> float:
        """Cost of the vocabulary head [V, D] for a token, in units of the layers' cost."""
        return self.num_head_parameters / self.num_block_parameters

    def image_cost(self, grids: Tensor) -> float:
        """Cost of the vision encoder for images, in units of the cost of the layers for a token.

        Args:
            grids: [I, 3], number of patches of each image along time, height and width.
        """
        encoder = self.vision_encoder
        if encoder is None:
            return 0.0
        # Two operations per parameter in the forward pass, four in the backward pass.
        flops_per_token = 6 * self.num_block_parameters
        return encoder.update_flops(grids) / flops_per_token

    def forward_flops(
        self, num_tokens: int, num_predicted: int, sum_of_squared_lengths: int
    ) -> float:
        """Operations of one forward pass. A backward pass costs twice as much.

        Args:
            num_tokens: N.
            num_predicted: number of tokens that the head is applied to.
            sum_of_squared_lengths: over the sequences. Causal attention computes half of each.
        """
        # Two operations per parameter and token. Attention has two products per pair of tokens,
        # with two operations per number, for half of the pairs.
        blocks = 2 * self.num_block_parameters * num_tokens
        head = 2 * self.num_head_parameters * num_predicted
        attention = 2 * self.attention_width * sum_of_squared_lengths
        return float(blocks + head + attention)

    def update_flops(
        self, num_tokens: int, num_predicted: int, sum_of_squared_lengths: int
    ) -> float:
        """Operations of a forward and a backward pass.

        A frozen matrix takes part in only half of the backward pass.

        Args:
            num_tokens: N.
            num_predicted: number of tokens that the head is applied to.
            sum_of_squared_lengths: over the sequences.
        """
        # The backward pass computes the gradient of the input and, if the matrix is trained, the
        # gradient of the matrix. Each costs as much as the forward pass.
        frozen_blocks = self.num_frozen_block_parameters * num_tokens
        frozen_head = self.num_frozen_head_parameters * num_predicted
        forward = self.forward_flops(num_tokens, num_predicted, sum_of_squared_lengths)
        return 3 * forward - 2.0 * (frozen_blocks + frozen_head)

    def update_flops_of(self, packed: PackedBatch) -> float:
        """Operations of an update on a packed micro-batch of tokens [1, N] and its images."""
        flops = self.update_flops(
            packed.num_tokens, len(packed.targets), packed.sum_of_squared_lengths
        )
        if packed.images is not None and self.vision_encoder is not None:
            flops += self.vision_encoder.update_flops(packed.images.grids)
        return flops


def model_cost(model: PreTrainedModel) -> ModelCost:
    """Count a model's matrix parameters [out, in].

    Embeddings do not count, because they are only looked up. Of a mixture's experts, only those
    count that a token goes through. Convolutions and recurrent states are left out, because they
    are negligible.
    """
    config = model.config.get_text_config()
    body = backbone(model)
    # Weights of the layers, each with the number of its parameters that multiply a token.
    block_sizes = []

    # By identity, so that a table that is tied to the head does not count among the layers.
    excluded_ids = set()
    for module in body.modules():
        if isinstance(module, nn.Embedding):
            excluded_ids.add(id(module.weight))

    for mixture in mixtures(model):
        num_chosen = getattr(router_of(mixture), "top_k", None) or config.num_experts_per_tok
        # A token goes through this share of the experts.
        share = num_chosen / mixture.experts.num_experts
        for weight in mixture.experts.parameters():
            excluded_ids.add(id(weight))
            if weight.dim() == 3:  # not a bias
                block_sizes.append((weight, int(weight.numel() * share)))

    # Each other matrix multiplies each token once.
    for weight in body.parameters():
        if weight.dim() == 2 and id(weight) not in excluded_ids:
            block_sizes.append((weight, weight.numel()))
    head_sizes = [(weight, weight.numel()) for weight in head_of(model).parameters()]

    num_heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
    return ModelCost(
        num_block_parameters=sum(size for _, size in block_sizes),
        num_head_parameters=sum(size for _, size in head_sizes),
        attention_width=config.num_hidden_layers * num_heads * head_size,
        num_frozen_block_parameters=_num_frozen(block_sizes),
        num_frozen_head_parameters=_num_frozen(head_sizes),
        vision_encoder=VisionEncoderCost.of(model),
    )


def _num_frozen(sizes: list[tuple[Tensor, int]]) -> int:
    """Sum the sizes of weights that are not trained."""
    return sum(size for weight, size in sizes if not weight.requires_grad)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a product of square matrices, in a tenth of a second.

    Measured, because the peak of a data sheet may not be reached on this machine.

    Args:
        device: device to measure.
        dtype: dtype of the matrices.

    Returns:
        Operations per second of the fastest of four products.
    """
    size = 1024
    if device.type == "cuda":
        size = 4096
    elif device.type == "cpu" and dtype == torch.float16:
        # Most CPUs are slow in float16.
        size = 256
    # Not random: drawing from torch's generator would make a resumed run differ from one that was
    # never interrupted.
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    seconds = [_seconds_of_product(left, right) for _ in range(4)]
    return 2 * size**3 / min(seconds)


def _seconds_of_product(left: Tensor, right: Tensor) -> float:
    """Measure the time of one product. On a GPU, by events, which exclude the launch."""
    if not left.is_cuda:
        start_s = time.perf_counter()
        torch.mm(left, right)
        return time.perf_counter() - start_s
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    torch.mm(left, right)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
