# SPDX-License-Identifier: Apache-2.0
"""Formulas of the memory that an update takes, for a dense decoder with gated MLPs.

Bytes on an accelerator at the moments that may be the peak; each line adds to the first one:

    between updates       weights, float32 masters, AdamW's moments
    end of forward        + tensors that the backward pass of each layer needs
    head, backward        + a chunk of the logits' gradient, and the head's gradient twice
    layers, backward      + gradients of the MLP's activations
    optimizer step        + float32 gradients of all parameters

Gradients count from the first micro-batch on, since later ones add to them. The terms follow the
code, and agree with the bytes of all live tensors on the stand-in for CUDA
(tests/rehearsal/test_memory.py). On a CPU plain torch computes: the head has the logits of shorter
chunks in float32, and attention keeps its results in float32.

Legend: N packed tokens, M predicted tokens, D hidden size, F width of the MLP, Q and K numbers of a
token's queries and keys, V vocabulary, r rank of an adapter.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quadriga.planning.sizes import ModelSizes

_CHUNK_TOKENS = 2048  # tokens whose logits' gradient is in memory at once
_CPU_CHUNK_TOKENS = 512  # the same on a CPU
_WIDE_TOKENS = 8192  # largest N for which a CPU keeps results of attention in float32
_HEAD_BLOCK = 4096  # rows of the head that a CPU converts to float32 at a time
_ROWS_PER_PART = 8192  # rows of the head with one set of statistics per token
_COLUMN_BYTES = 170  # bytes of a token in a packed batch of a pass without gradients
# Names of the working memory at each moment, by its largest part.
_HEAD_WORK = "logits and gradients of the head and any gathered weights"
_LAYER_WORK = "gradients and any gathered weights of layers"
_SUM_WORK = "gradients being summed"
_NUM_LINEAR = 7  # linear modules of a layer, each with an adapter


@dataclass(frozen=True)
class UpdateShape:
    """Conditions of an update, or of a pass without gradients, that decide about its memory.

    Attributes:
        num_tokens: N of the largest micro-batch.
        num_predicted: M of the largest micro-batch.
        itemsize: bytes of a number of the dtype that computes.
        recomputes: whether activations are recomputed (gradient checkpointing).
        num_shards: ranks that shard the weights (FSDP).
        adapter_rank: r; 0 if all weights are trained.
        has_head: whether a vocabulary head computes; False for a critic.
        has_gradients: whether gradients of an earlier micro-batch are in memory.
        is_on_cpu: whether a CPU computes.
    """

    num_tokens: int
    num_predicted: int
    itemsize: int = 2
    recomputes: bool = False
    num_shards: int = 1
    adapter_rank: int = 0
    has_head: bool = True
    has_gradients: bool = True
    is_on_cpu: bool = False


@dataclass(frozen=True)
class UpdateMemory:
    """Predicted bytes at the peak of an update on one rank.

    Attributes:
        weights: weights that compute, and their float32 masters if these are other tensors.
        optimizer: AdamW's moments.
        gradients: float32 sums of gradients.
        activations: tensors that are kept for the backward pass.
        working: tensors that exist only at the moment of the peak: gathered weights, gradients of
            activations, a chunk of the logits' gradient.
        moment: name of the moment.
        working_name: name of the largest part of `working`.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float
    working: float
    moment: str
    working_name: str

    @property
    def total(self) -> float:
        """All bytes at the peak."""
        state = self.weights + self.optimizer + self.gradients
        return state + self.activations + self.working


def layer_bytes(sizes: ModelSizes, shape: UpdateShape) -> float:
    """Bytes of activations that a layer keeps for its backward pass, with its input [N, D]."""
    # Of size D: input, first norm, sum and second norm. Of Q: queries and result of attention. Of
    # K: keys and values. Of F: gate, up and product.
    numbers = 4 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys + 3 * sizes.mlp
    # Norms keep a float32 scale per token, attention a log-sum-exp per head.
    wide_numbers = 2 + sizes.num_heads
    if sizes.norms_queries:
        numbers += sizes.queries + sizes.keys
        wide_numbers += (sizes.queries + sizes.keys) // sizes.head_size
    if shape.is_on_cpu and shape.itemsize < 4 and shape.num_tokens <= _WIDE_TOKENS:
        # The result of attention before it is rounded to the narrow dtype.
        wide_numbers += sizes.queries
    numbers += _NUM_LINEAR * shape.adapter_rank
    return shape.num_tokens * (numbers * shape.itemsize + wide_numbers * 4)


def update_memory(sizes: ModelSizes, shape: UpdateShape) -> UpdateMemory:
    """Predict the memory at the peak of an update.

    Args:
        sizes: the model.
        shape: the conditions.

    Returns:
        Bytes at the peak, by purpose.
    """
    # With an adapter all parameters of the model are frozen.
    num_frozen = sizes.num_parameters if shape.adapter_rank else 0
    num_trained = trained_parameters(sizes, shape.adapter_rank)
    # float32 masters.
    weights = 4.0 * num_trained / shape.num_shards
    if shape.num_shards == 1 and shape.itemsize < 4:
        # Narrow copies of the float32 masters compute. With shards they are gathered when a layer
        # needs them.
        weights += num_trained * shape.itemsize
    weights += num_frozen * shape.itemsize / shape.num_shards
    optimizer = 8.0 * num_trained / shape.num_shards
    gradients = 4.0 * num_trained / shape.num_shards

    moments = _candidate_moments(sizes, shape)
    peak = max(moments, key=lambda moment: moment.activations + moment.working)
    # With earlier gradients, those are in memory at all moments. Without, they only exist at the
    # optimizer step, which may then be the peak.
    if not shape.has_gradients and gradients > peak.activations + peak.working:
        peak = _Moment("the optimizer step", 0.0, gradients, "gradients")
    return UpdateMemory(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients if shape.has_gradients else 0.0,
        activations=peak.activations,
        working=peak.working,
        moment=peak.name,
        working_name=peak.working_name,
    )


def trained_parameters(sizes: ModelSizes, adapter_rank: int) -> int:
    """Number of trained parameters: all, or with an adapter its factors [r, in] and [out, r]."""
    if not adapter_rank:
        return sizes.num_parameters
    # Sums of in + out over the linear modules of a layer: four of attention, three of the MLP.
    attention = 4 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys
    mlp = 3 * (sizes.hidden + sizes.mlp)
    return sizes.num_layers * adapter_rank * (attention + mlp)


def forward_bytes(sizes: ModelSizes, shape: UpdateShape) -> float:
    """Predict the memory of a pass without gradients at its peak, besides the weights.

    Args:
        sizes: the model.
        shape: the conditions.

    Returns:
        Bytes of activations, and of weights that are gathered for the pass.
    """
    token_bytes = shape.num_tokens * shape.itemsize
    # Cosines and sines; columns of the packed batch, most of them int64.
    positions = shape.num_tokens * (2 * sizes.head_size * shape.itemsize + _COLUMN_BYTES)
    # The peak inside a layer: the residual stream and its norm, with the larger one of two moments.
    # One has the steps of the rotation of queries and keys.
    attention = 7 * (sizes.queries + sizes.keys)
    # The other has gate, up and product of the MLP, and the output of an adapter of one of them.
    mlp = (4 if shape.adapter_rank else 3) * sizes.mlp
    layer = token_bytes * (2 * sizes.hidden + max(mlp, attention))
    # The peak at the head: hidden states of all tokens and of the predicted ones, and statistics.
    head = 0.0
    if shape.has_head:
        states = (shape.num_tokens + shape.num_predicted) * sizes.hidden * shape.itemsize
        head = states + _statistics_bytes(sizes, shape)
        if shape.is_on_cpu:
            head += _logits_bytes(sizes, shape)
    return positions + _gathered_bytes(sizes, shape) + max(layer, head)


class _Moment(NamedTuple):
    """A moment that may be the peak of an update. See `UpdateMemory` for its fields."""

    name: str
    activations: float
    working: float
    working_name: str


def _outside_layers(sizes: ModelSizes) -> int:
    """Parameters of the embedding, the head and the last norm."""
    return sizes.num_parameters - sizes.num_layers * sizes.layer_parameters


def _root_parameters(sizes: ModelSizes) -> int:
    """Parameters of FSDP's root module, which are gathered for a whole pass.

    These are the parameters outside layers, but not an untied embedding: it is sharded on its own.
    """
    return _outside_layers(sizes) - (0 if sizes.is_tied else sizes.table_parameters)


def _gathered_bytes(sizes: ModelSizes, shape: UpdateShape) -> float:
    """Bytes of the weights that a sharded model gathers at a time, in the dtype that computes.

    They are the weights of the root module and of a layer, and on an accelerator of the next layer,
    which is gathered while the first one computes.
    """
    if shape.num_shards == 1:
        return 0.0
    num_layers = 1 if shape.is_on_cpu else min(2, sizes.num_layers)
    return (_root_parameters(sizes) + num_layers * sizes.layer_parameters) * shape.itemsize


def _candidate_moments(sizes: ModelSizes, shape: UpdateShape) -> list[_Moment]:
    """Moments of the forward and backward passes that may be the peak."""
    token_bytes = shape.num_tokens * shape.itemsize
    # Activations that each layer keeps for the backward pass. With recomputation that is its input,
    # and all others exist during the backward pass of one layer.
    per_layer = token_bytes * sizes.hidden
    recomputed = 0.0  # the other activations of one layer
    if shape.recomputes:
        recomputed = max(0.0, layer_bytes(sizes, shape) - per_layer)
    else:
        per_layer = layer_bytes(sizes, shape)
    # Cosines and sines of the positions; int64 tokens, positions and places in shared prompts.
    positions = shape.num_tokens * (2 * sizes.head_size * shape.itemsize + 3 * 8)
    # int64 targets and their places, and columns of the batch.
    targets = shape.num_predicted * (4 * 8 + 12)
    kept_bytes = sizes.num_layers * per_layer + positions + targets
    # Input of the last norm, and its float32 scale of each token.
    last_norm = shape.num_tokens * (sizes.hidden * shape.itemsize + 4)
    # Hidden states from which tokens are predicted.
    states = shape.num_predicted * sizes.hidden * shape.itemsize

    # Gradients of the layer's output (D) and of the MLP's product, gate and up (3 F), when the
    # product itself (F) has been freed.
    layer_work = recomputed + token_bytes * (sizes.hidden + 2 * sizes.mlp)
    if sizes.is_tied and shape.has_head and not shape.adapter_rank:
        # The gradient of the shared parameter from the embedding is added to that from the head at
        # the end of the backward pass.
        layer_work += sizes.table_parameters * shape.itemsize

    gathered = _gathered_bytes(sizes, shape)
    moments = []
    if shape.num_shards > 1:
        if sizes.num_layers > 1:
            # During the backward pass of the last layer but one: the last layer has freed its
            # activations, but its gradients are still being summed over the ranks in float32.
            summed = sizes.layer_parameters * 4.0 * (1 + 1 / shape.num_shards)
            work = layer_work + gathered + summed
            if sizes.num_layers == 2 and not shape.is_on_cpu:
                # The last layer but one is the first one here, so no further layer is gathered.
                work -= sizes.layer_parameters * shape.itemsize
            moments.append(
                _Moment("the layers' backward pass", kept_bytes - per_layer, work, _LAYER_WORK)
            )
        # Embedding and head at the end: weights and gradients, and the gradients that are being
        # summed (of the root, or of an untied embedding) once more in float32.
        ends = _outside_layers(sizes) * 2 * shape.itemsize + _root_parameters(sizes) * 4.0
        sums = 4.0 * sizes.num_parameters / shape.num_shards
        moments.append(
            _Moment("the end of the backward pass", positions + targets, ends + sums, _SUM_WORK)
        )

    head_work = _head_bytes(sizes, shape) + gathered
    moments.append(
        _Moment("the head's backward pass", kept_bytes + last_norm + states, head_work, _HEAD_WORK)
    )
    # During the backward pass of the last layer all activations are still kept.
    layer_work += gathered
    moments.append(_Moment("the layers' backward pass", kept_bytes, layer_work, _LAYER_WORK))
    return moments


def _head_bytes(sizes: ModelSizes, shape: UpdateShape) -> float:
    """Working memory of the backward pass of the vocabulary head, in bytes.

    The activations that are kept for the backward pass are not included.
    """
    num_predicted = shape.num_predicted
    if not shape.has_head:
        # A value head has one output for each token; a float32 copy of its inputs is all.
        return num_predicted * sizes.hidden * 4.0
    statistics = _statistics_bytes(sizes, shape)
    # The gradient of the hidden states.
    gradient = num_predicted * sizes.hidden * shape.itemsize
    # The gradient of the logits of a chunk of tokens.
    chunk: float = min(_CHUNK_TOKENS, num_predicted) * sizes.vocabulary * shape.itemsize
    # The weight's gradient is summed over the chunks in float32, then rounded.
    gradient_itemsize = 4.0 + shape.itemsize
    if shape.is_on_cpu:
        chunk = _logits_bytes(sizes, shape)
        if shape.itemsize < 4:
            # The gradient of the logits, rounded for the products with it.
            chunk += min(_CPU_CHUNK_TOKENS, num_predicted) * sizes.vocabulary * shape.itemsize
        gradient_itemsize = shape.itemsize
    weight_gradient = 0.0
    if not shape.adapter_rank:
        weight_gradient = sizes.table_parameters * gradient_itemsize
    return statistics + chunk + gradient + weight_gradient


def _statistics_bytes(sizes: ModelSizes, shape: UpdateShape) -> float:
    """Bytes of the head's statistics: four float32 numbers for each token and each part of the head.

    A part has `_ROWS_PER_PART` rows of the head on an accelerator, and all rows on a CPU.
    """
    num_parts = 1 if shape.is_on_cpu else -(-sizes.vocabulary // _ROWS_PER_PART)
    return shape.num_predicted * 4.0 * 4 * num_parts


def _logits_bytes(sizes: ModelSizes, shape: UpdateShape) -> float:
    """Bytes on a CPU of a chunk's logits and of the head's rows that compute them, in float32."""
    num_bytes = 4.0 * min(_CPU_CHUNK_TOKENS, shape.num_predicted) * sizes.vocabulary
    if shape.itemsize < 4:
        num_bytes += 4.0 * min(_HEAD_BLOCK, sizes.vocabulary) * sizes.hidden
    return num_bytes
