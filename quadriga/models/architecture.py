# SPDX-License-Identifier: Apache-2.0
"""Choice of how to compute a model's architecture, by a trial before weights are read.

    packed           All mixing of tokens is attention that an `AttentionPlan` can compute: many
                     rows in one call.
    one at a time    Layers keep a state (convolution, Mamba, linear attention), or compute
                     attention in their own way (ALiBi, chunks): one row per call, by transformers'
                     own attention.
    refused          Transformers itself cannot compute the model here, or its logits are not the
                     products of its head.

The trial builds a small float32 model with random weights, which has each kind of layer of the
configuration. Its log-probs for packed rows are compared with those that transformers' own forward
(eager) computes row by row. Windows and caps are narrowed so that they affect short rows.

Legend: B rows, N tokens of each, M response tokens, D hidden size, V vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from quadriga.errors import EngineError, first_line
from quadriga.models.attention import ATTENTION_NAME, PackedBatch, Segment
from quadriga.models.fused import fuse
from quadriga.models.heads import LogitRule
from quadriga.models.vision import is_vision

# Nats by which log-probs in float32 may differ from those of transformers' own forward.
BOUND = 1e-4
# Values that the small model of a trial gets in place of the configured ones.
_NARROWED: dict[str, Any] = {
    "sliding_window": 5,
    "attention_chunk_size": 6,
    "attention_window_size": 5,
    "window_size": 5,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
}
# Upper limits of sizes of the small model.
_SHRUNK = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_dim": 64,
    "n_inner": 64,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "max_position_embeddings": 256,
}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations use for the number of experts of a layer."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Entries that define by a single number how the kinds of layers alternate.
_PERIODS = (
    "first_k_dense_replace",
    "full_attention_interval",
    "attn_layer_period",
    "expert_layer_period",
)
_MIN_LAYERS = 2  # minimum number of layers of the small model
_WIDTH = 128  # hidden size of the small model, if the size of its heads does not depend on it
# Entries by which the configuration of a loaded model may differ from the one in its folder.
_UNIMPORTANT = (
    "dtype",
    "architectures",
    "transformers_version",
    "pad_token_id",
    "num_labels",
    "id2label",
    "label2id",
)
# Errors of models that do not support an attention implementation, or one of its arguments.
_UNSUPPORTED = (
    EngineError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Way:
    """Way of computing an architecture.

    Attributes:
        attention: `ATTENTION_NAME` if rows are packed, otherwise transformers' implementation that
            computes them one at a time.
        generation_attention: transformers' implementation for `generate`.
        reason: why rows are not packed; empty if they are.
    """

    attention: str
    generation_attention: str
    reason: str = ""


PACKED = Way(ATTENTION_NAME, "sdpa")
_ways: dict[str, Way] = {}  # results of this process's trials, by configuration


def backbone(model: PreTrainedModel) -> nn.Module:
    """Find the decoder of a model, which turns tokens [B, N] into hidden states [B, N, D]."""
    body = model.base_model
    if body is model:
        # Llama 4 does not have its decoder under the name that it declares.
        body = getattr(model, "model", model)
    return getattr(body, "language_model", body)


def tensor_plan(text: PreTrainedConfig) -> dict[str, str] | None:
    """Find the tensor-parallel plan that transformers declares for a decoder's projections.

    Args:
        text: configuration of the decoder.

    Returns:
        Style of each projection by name, or None if nothing is declared.
    """
    # Qwen3-VL declares nothing, but has the layers of Qwen3.
    source = Qwen3Config if text.model_type == "qwen3_vl_text" else text
    return getattr(source, "base_model_tp_plan", None)


def head_of(model: PreTrainedModel) -> nn.Module:
    """Find the vocabulary projection: a module with `weight` [V, D] and perhaps `bias` [V].

    Raises:
        EngineError: the model has no such projection.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise EngineError(
            f"model {type(model).__name__}",
            got="no projection to the vocabulary",
            expected="a causal language model",
        )
    return head


def is_packed(model: PreTrainedModel) -> bool:
    """Whether a model takes packed rows with an attention plan, instead of single rows [1, N]."""
    return model.config._attn_implementation == ATTENTION_NAME


def length_limit(config: PreTrainedConfig) -> int | None:
    """Length of a row beyond which its rotary positions depend on its length.

    Longer rows must be computed alone.

    Args:
        config: configuration of the model.

    Returns:
        The length in tokens; None if positions never depend on the length.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    sections = [rope]
    if all(isinstance(section, dict) for section in rope.values()):
        # One section per kind of layer.
        sections = list(rope.values())
    limits = []
    for section in sections:
        limit = section.get("original_max_position_embeddings")
        if section.get("rope_type") == "longrope" and limit:
            limits.append(limit)
    return min(limits, default=None)


def way_of(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Way:
    """Choose how to compute a model, by a trial of some tenths of a second.

    A process tries each configuration once. Vision-language models are not tried: the supported
    types (`is_vision`) can all be packed.

    Args:
        config: configuration of the model.
        trust_remote_code: whether code that ships with the model may run.

    Returns:
        The way to compute it.

    Raises:
        EngineError: the model cannot be computed. The message says why.
    """
    if is_vision(config):
        return PACKED
    items = config.to_dict().items()
    entries = {name: value for name, value in items if name not in _UNIMPORTANT}
    key = f"{entries} {trust_remote_code}"
    if key not in _ways:
        # A trial draws random weights, which must not change the random numbers of the run.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                trial = _Trial(small_config(config, width=_WIDTH), trust_remote_code)
                _ways[key] = trial.choose_way()
            except EngineError:
                # Some architectures work only with their configured hidden size. Keep it.
                _ways[key] = _Trial(small_config(config), trust_remote_code).choose_way()
    return _ways[key]


def choose_attention(model: PreTrainedModel, *, trust_remote_code: bool = False) -> None:
    """Set transformers' attention in a model that, by its trial, cannot compute packed rows.

    Args:
        model: model with the attention `ATTENTION_NAME`, changed in place.
        trust_remote_code: whether code that ships with the model may run.

    Raises:
        EngineError: the model cannot be computed; see `way_of`.
    """
    way = way_of(model.config, trust_remote_code=trust_remote_code)
    if way.attention != ATTENTION_NAME:
        model.set_attn_implementation(way.attention)


def small_config(config: PreTrainedConfig, *, width: int | None = None) -> PreTrainedConfig:
    """Configuration of a small model with each kind of layer. Heads stay as they are.

    Args:
        config: configuration of the full model.
        width: upper limit of the hidden size D, for models in which the size of heads does not
            depend on D. None: D stays as it is.
    """
    small = copy.deepcopy(config.get_text_config())
    _keep_kinds_of_layers(small)
    if width is not None and getattr(small, "head_dim", None):
        small.hidden_size = min(width, small.hidden_size)
    for name, limit in _SHRUNK.items():
        size = getattr(small, name, None)
        if isinstance(size, int):
            setattr(small, name, min(size, limit))
    for name, value in _NARROWED.items():
        if name in vars(small) and getattr(small, name):
            setattr(small, name, value)
    for name in EXPERT_COUNTS:
        num_experts = getattr(small, name, None)
        if isinstance(num_experts, int):
            # Routers choose within groups of experts, so each group needs several experts.
            num_groups = getattr(small, "n_group", None) or 1
            num_chosen = getattr(small, "num_experts_per_tok", None) or 1
            setattr(small, name, min(num_experts, num_groups * max(4, num_chosen)))
    # Special tokens must be in the small vocabulary.
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    return small


def _keep_kinds_of_layers(small: PreTrainedConfig) -> None:
    """Drop the last layers of a configuration, but keep one of each kind."""
    num_layers = int(small.num_hidden_layers)
    if num_layers < 2:
        return
    # Lists with an entry per layer. Two layers are of the same kind if they have the same entries.
    lists = {}
    for name, value in vars(small).items():
        if isinstance(value, list) and len(value) == num_layers:
            lists[name] = value
    kinds = list(zip(*lists.values(), strict=True))

    # Keep the first layer of each kind, whose number `index` finds, and one period of each
    # alternation.
    first_layers = [kinds.index(kind) for kind in kinds]
    periods = [getattr(small, name, None) or 0 for name in _PERIODS]
    num_kept = min(num_layers, max(_MIN_LAYERS, 1 + max(first_layers + periods)))
    for name, value in lists.items():
        setattr(small, name, value[:num_kept])
    small.num_hidden_layers = num_kept


def draw_sample_rows(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Draw three rows of prompt and response, of 8 to 16 tokens. The first two share a prompt."""
    generator = torch.Generator().manual_seed(0)
    sizes = (9, 4, 3, 7, 5)  # of two prompts and three responses
    tokens = [torch.randint(1, vocabulary, (size,), generator=generator) for size in sizes]
    first, second, *responses = [part.tolist() for part in tokens]
    return [(first, responses[0]), (first, responses[1]), (second, responses[2])]


def pack_rows(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> PackedBatch:
    """Pack rows into one batch, which predicts all response tokens.

    A simple counterpart of `engines.packing.pack`, for checks of models.

    Args:
        rows: prompt and response of each row. Consecutive rows with the same prompt share it.
        device: device of the batch.

    Returns:
        The batch. Its `sum_of_squared_lengths` is only an upper limit.
    """
    tokens = []
    positions = []
    segments = []
    predictors = []
    targets = []
    target_rows = []
    target_columns = []
    prompt_segment = Segment(0, 0)
    for row, (prompt, response) in enumerate(rows):
        if row == 0 or rows[row - 1][0] != prompt:
            prompt_segment = Segment(len(tokens), len(prompt))
            segments.append(prompt_segment)
            tokens += prompt
            positions += range(len(prompt))

        # The last response token predicts nothing, so it is not computed.
        start = len(tokens)
        segments.append(Segment(start, len(response) - 1, prompt_segment))
        tokens += response[:-1]
        positions += range(len(prompt), len(prompt) + len(response) - 1)
        predictors.append(prompt_segment.start + prompt_segment.length - 1)
        predictors += range(start, len(tokens))
        targets += response
        target_rows += [row] * len(response)
        target_columns += range(len(response))
    to_tensor = partial(torch.tensor, device=device)
    return PackedBatch(
        input_ids=to_tensor([tokens]),
        position_ids=to_tensor([positions]),
        segments=tuple(segments),
        predictors=to_tensor(predictors),
        host_predictors=np.array(predictors),
        targets=to_tensor(targets),
        rows=to_tensor(target_rows),
        columns=to_tensor(target_columns),
        shape=(len(rows), max(len(response) for _, response in rows)),
        sum_of_squared_lengths=len(tokens) ** 2,
    )


class _Trial:
    """Computes a small model in several ways, and compares their log-probs.

    Args:
        config: configuration of the small model.
        trust_remote_code: whether code that ships with the model may run.
    """

    def __init__(self, config: PreTrainedConfig, trust_remote_code: bool) -> None:
        self.config = config
        self.trust_remote_code = trust_remote_code
        self.name = (config.architectures or [config.model_type])[0]
        self.rows = draw_sample_rows(config.vocab_size)

    def choose_way(self) -> Way:
        """Choose the first way whose log-probs equal those of transformers' own forward.

        Raises:
            EngineError: transformers cannot compute the model, or its logits are not the products
                of hidden states and head.
        """
        try:
            model = self.build_model("eager")
            # The same model, with transformers' logits and with products of its head.
            expected = transformers_log_probs(model, self.rows)
            computed = self.log_probs_of_rows(model)
        except Exception as error:
            # Code of an architecture, which may come with the model, can raise anything.
            raise EngineError(
                f"model {self.name}",
                got=first_line(error),
                expected="an architecture that this version of transformers computes here",
                fix="Install what it names, or take another actor_rollout_ref.model.path; "
                "docs/models.md lists them.",
            ) from error
        difference = _max_difference(computed, expected)
        if difference > BOUND:
            raise EngineError(
                f"model {self.name}",
                got="logits that are not the products of its head with its states: "
                f"log-probs differ by {difference:.2g} nats",
                expected="products with one matrix, which may be scaled and capped",
                fix="Take a model of an architecture in docs/models.md.",
            )
        reason = self.unsupported_reason(ATTENTION_NAME, expected)
        # For `generate`, and for rows if they cannot be packed.
        fallback = "eager" if self.unsupported_reason("sdpa", expected) else "sdpa"
        return Way(fallback if reason else ATTENTION_NAME, fallback, reason)

    def unsupported_reason(self, attention: str, expected: Tensor) -> str:
        """Explain why an implementation of attention cannot compute the model; "" if it can.

        The text is about packed rows. Of other implementations, only use whether it is empty.

        Args:
            attention: name of the implementation.
            expected: [M] log-probs by transformers' own forward.
        """
        try:
            model = self.build_model(attention)
            if attention == ATTENTION_NAME:
                fuse(model)
                log_probs = _log_probs(model, pack_rows(self.rows, torch.device("cpu")))
            else:
                log_probs = self.log_probs_of_rows(model)
        except _UNSUPPORTED as error:
            return f"its layers do not take packed rows: {first_line(error)}"
        difference = _max_difference(log_probs, expected)
        if difference > BOUND:
            return f"packed, its log-probs would be off by {difference:.2g} nats"
        return ""

    def build_model(self, attention: str) -> PreTrainedModel:
        """Build the model with random weights, which are the same in each call.

        Args:
            attention: name of the implementation of attention.
        """
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            self.config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=self.trust_remote_code,
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.data = noise * parameter.shape[-1] ** -0.5
            else:
                # Norms and biases stay near their initial values.
                parameter.data = parameter + 0.2 * noise
        return model.eval()

    def log_probs_of_rows(self, model: PreTrainedModel) -> Tensor:
        """Compute the log-probs [M] of the response tokens, row by row, as products of the head."""
        cpu = torch.device("cpu")
        return torch.cat([_log_probs(model, pack_rows([row], cpu)) for row in self.rows])


def transformers_log_probs(
    model: PreTrainedModel, rows: Sequence[tuple[list[int], list[int]]]
) -> Tensor:
    """Compute the log-probs of response tokens by transformers' own forward, row by row.

    Args:
        model: model with transformers' own attention.
        rows: prompt and response of each row.

    Returns:
        [M] float32.
    """
    log_probs = []
    for prompt, response in rows:
        tokens = torch.tensor([prompt + response], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0]  # [N, V]
        # The logits at a token predict the next one.
        predictions = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
        targets = tokens[0, len(prompt) :, None]
        log_probs.append(predictions.gather(-1, targets)[:, 0])
    return torch.cat(log_probs)


def _log_probs(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Compute the log-probs [M] of a batch's targets, as products of hidden states and head."""
    options = {"attention_plan": batch.plan} if is_packed(model) else {}
    head = head_of(model)
    output = backbone(model)(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        use_cache=False,
        **options,
    )
    states = output.last_hidden_state[0, batch.predictors]  # [M, D]
    logits = LogitRule.of(model.config).apply(head(states).float())
    log_probs = logits.log_softmax(-1)  # [M, V]
    return log_probs.gather(-1, batch.targets[:, None])[:, 0]


def _max_difference(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference; infinite if any is NaN."""
    difference = float((left - right).abs().max())
    return math.inf if math.isnan(difference) else difference
