# SPDX-License-Identifier: Apache-2.0
"""How a model's architecture is computed: found by trial, before weights are read.

    packed           all that mixes tokens is attention that an `AttentionPlan` knows: many rows in one call
    one at a time    by transformers' own attention, where layers keep a state (convolution, Mamba, linear attention),
                     or compute attention in their own way (ALiBi, chunks)
    refused          transformers itself cannot compute it here, or its logits are not those of its head

The trial is a small float32 model of the same configuration with each kind of layer and random weights, beside the same
rows alone by transformers' own forward (eager). Windows and caps are narrowed, so that they act on its short rows.

Legend: B rows, N tokens of each, D hidden size, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from quadriga.errors import EngineError, first_line
from quadriga.models.attention import ATTENTION_NAME, PackedBatch, Segment
from quadriga.models.fused import fuse
from quadriga.models.heads import LogitRule
from quadriga.models.vision import is_vision

BOUND = (
    1e-4  # nats by which log-probs in float32 may differ from those of transformers' own forward
)
_NARROWED: dict[str, Any] = {
    "sliding_window": 5, "attention_chunk_size": 6, "attention_window_size": 5, "window_size": 5,
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "logits_soft_cap": 2.0,
}  # fmt: skip
_SHRUNK = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "ffn_dim": 64,
    "n_inner": 64, "vocab_size": 96, "vocab_size_per_layer_input": 96, "max_position_embeddings": 256,
}  # fmt: skip
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts of a layer."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Of configurations that say with one number how their kinds of layers alternate.
_PERIODS = (
    "first_k_dense_replace",
    "full_attention_interval",
    "attn_layer_period",
    "expert_layer_period",
)
_LAYERS, _WIDTH = 2, 128
# What a loaded model's configuration may have otherwise than the one in its folder.
_UNIMPORTANT = (
    "dtype",
    "architectures",
    "transformers_version",
    "pad_token_id",
    "num_labels",
    "id2label",
    "label2id",
)


@dataclass(frozen=True)
class Way:
    """How an architecture is computed."""

    attention: str  # `ATTENTION_NAME` where rows are packed, else that of transformers which computes one at a time
    generating: str  # the implementation of transformers that `generate` may use
    reason: str = ""  # why rows are not packed; empty if they are


# What models raise that do not know this attention, or an argument of it: they are computed in another way.
_NOT_TAKEN = (
    EngineError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
PACKED = Way(ATTENTION_NAME, "sdpa")
_found: dict[str, Way] = {}


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of a model that turns tokens [B, N] into hidden states [B, N, D], without a vision encoder."""
    # Llama 4 has its decoder under another name than it says.
    body = model.base_model if model.base_model is not model else getattr(model, "model", model)
    return getattr(body, "language_model", body)


def tensor_plan(text: PreTrainedConfig) -> dict[str, str] | None:
    """How tensor parallelism shares a decoder's projections, as transformers declares it: style by name; None: it
    declares nothing. The layers of Qwen3-VL, which declares nothing, are those of Qwen3."""
    kind = Qwen3Config if text.model_type == "qwen3_vl_text" else text
    return getattr(kind, "base_model_tp_plan", None)


def head_of(model: PreTrainedModel) -> nn.Module:
    """The projection from hidden states to the vocabulary: a module with `weight` [V, D] and perhaps `bias`."""
    if (head := model.get_output_embeddings()) is None:
        raise EngineError(
            f"model {type(model).__name__}",
            "no projection to the vocabulary",
            "a causal language model",
        )
    return head


def is_packed(model: PreTrainedModel) -> bool:
    """Whether it takes packed rows, and an attention plan with them; else one row [1, N] at a time."""
    return model.config._attn_implementation == ATTENTION_NAME


def length_limit(config: PreTrainedConfig) -> int | None:
    """Tokens of a row from which on its rotary positions depend on its length, so that it is computed alone."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(one, dict) for one in rope.values()) else [rope]
    limits = [
        one.get("original_max_position_embeddings")
        for one in kinds
        if one.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if limit), default=None)


def way_of(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Way:
    """How a model of this configuration is computed; tried once for each in a process, in some tenths of a second.

    Vision-language models, whose architectures are listed, are packed.
    Raises EngineError: it cannot be computed; says why."""
    if is_vision(config):
        return PACKED
    described = {name: one for name, one in config.to_dict().items() if name not in _UNIMPORTANT}
    key = f"{described} {trust_remote_code}"
    if key not in _found:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                _found[key] = _Trial(small_config(config, width=_WIDTH), trust_remote_code).way()
            except EngineError:
                # Perhaps its sizes do not fit each other any more.
                _found[key] = _Trial(small_config(config), trust_remote_code).way()
    return _found[key]


def choose_attention(model: PreTrainedModel) -> None:
    """Let a model that was made for packed rows [1, N] be computed in the way that its architecture can."""
    if (way := way_of(model.config)).attention != ATTENTION_NAME:
        model.set_attn_implementation(way.attention)


def small_config(config: PreTrainedConfig, *, width: int | None = None) -> PreTrainedConfig:
    """The configuration of a small model with each kind of layer of this one, and as many heads of the same size.
    `width` is that of its hidden states, where its heads have a size of their own; None: as it is."""
    small = copy.deepcopy(config.get_text_config())
    _keep_kinds_of_layers(small)
    if width is not None and getattr(small, "head_dim", None):
        small.hidden_size = min(width, small.hidden_size)
    for name, most in _SHRUNK.items():
        if isinstance(own := getattr(small, name, None), int):
            setattr(small, name, min(own, most))
    for name in _NARROWED.keys() & vars(small).keys():
        if getattr(small, name):
            setattr(small, name, _NARROWED[name])
    for name in EXPERT_COUNTS:
        if isinstance(own := getattr(small, name, None), int):
            groups, chosen = (
                getattr(small, one, None) or 1 for one in ("n_group", "num_experts_per_tok")
            )
            setattr(small, name, min(own, groups * max(4, chosen)))
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    return small


def _keep_kinds_of_layers(small: PreTrainedConfig) -> None:
    """Leave the first layers of a configuration, up to one of each kind."""
    number = int(small.num_hidden_layers)
    if number < 2:
        return
    lists = {
        name: one
        for name, one in vars(small).items()
        if isinstance(one, list) and len(one) == number
    }
    kinds = list(zip(*lists.values(), strict=True))
    needed = [1 + (getattr(small, name, None) or 0) for name in _PERIODS]
    kept = min(number, max(_LAYERS, 1 + max(map(kinds.index, kinds), default=0), *needed))
    for name, one in lists.items():
        setattr(small, name, one[:kept])
    small.num_hidden_layers = kept


def sample_rows(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, two of which are alike, with a response each: ragged, of 8 to 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    first, second, *responses = (
        torch.randint(1, vocabulary, (size,), generator=generator).tolist()
        for size in (9, 4, 3, 7, 5)
    )
    return [(first, responses[0]), (first, responses[1]), (second, responses[2])]


def packed_rows(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> PackedBatch:
    """Rows as one packed run of tokens, neighbours with the same prompt sharing it; all response tokens predicted."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    predictors: list[int] = []
    shared = Segment(0, 0)
    for number, (prompt, response) in enumerate(rows):
        if number == 0 or rows[number - 1][0] != prompt:
            shared = Segment(len(tokens), len(prompt))
            segments.append(shared)
            tokens += prompt
            positions += range(len(prompt))
        start = len(tokens)
        segments.append(Segment(start, len(response) - 1, shared))
        tokens += response[:-1]
        positions += range(len(prompt), len(prompt) + len(response) - 1)
        predictors += [shared.start + shared.length - 1, *range(start, len(tokens))]
    targets = [token for _, response in rows for token in response]
    places = [
        (number, column) for number, (_, one) in enumerate(rows) for column in range(len(one))
    ]
    tensors = (torch.tensor(one, device=device) for one in (tokens, positions, predictors, targets))
    ids, at, sources, wanted = tensors
    numbers, columns = torch.tensor(places, device=device).unbind(1)
    shape = len(rows), max(len(one) for _, one in rows)
    what = (
        ids[None],
        at[None],
        tuple(segments),
        sources,
        np.array(predictors),
        wanted,
        numbers,
        columns,
    )
    return PackedBatch(*what, shape, len(tokens) ** 2)


class _Trial:
    """A small model of a configuration, computed in several ways."""

    def __init__(self, config: PreTrainedConfig, trust_remote_code: bool) -> None:
        self.config, self.trust_remote_code = config, trust_remote_code
        self.name = (config.architectures or [config.model_type])[0]
        self.rows = sample_rows(config.vocab_size)

    def way(self) -> Way:
        """The first way that gives what transformers' own forward gives."""
        try:
            model = self.model("eager")
            exact, products = own_log_probs(model, self.rows), self.alone(model)
        except Exception as error:
            wanted = "an architecture that this version of transformers computes here"
            fix = "Install what it names, or take another actor_rollout_ref.model.path; docs/models.md lists them."
            raise EngineError(
                f"model {self.name}", got=first_line(error), expected=wanted, fix=fix
            ) from error
        if (off := _difference(products, exact)) > BOUND:
            got = f"logits that are not the products of its head with its states: log-probs differ by {off:.2g} nats"
            expected = "products with one matrix, which may be scaled and capped"
            raise EngineError(
                f"model {self.name}",
                got,
                expected,
                "Take a model of an architecture in docs/models.md.",
            )
        found = {name: self.off(name, exact) for name in (ATTENTION_NAME, "sdpa")}
        generating = "eager" if found["sdpa"] else "sdpa"
        if not (reason := found[ATTENTION_NAME]):
            return Way(ATTENTION_NAME, generating)
        return Way(generating, generating, reason)

    def off(self, attention: str, expected: torch.Tensor) -> str:
        """Why an implementation of attention cannot compute the model; empty if it can."""
        try:
            model = self.model(attention)
            if attention == ATTENTION_NAME:
                fuse(model)
                found = _log_probs(model, packed_rows(self.rows, torch.device("cpu")))
            else:
                found = self.alone(model)
        except _NOT_TAKEN as error:
            return f"its layers do not take packed rows: {first_line(error)}"
        off = _difference(found, expected)
        return "" if off <= BOUND else f"packed, its log-probs would be off by {off:.2g} nats"

    def model(self, attention: str) -> PreTrainedModel:
        """The same random model at each call."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            self.config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=self.trust_remote_code,
        )
        generator = torch.Generator().manual_seed(0)
        for one in model.parameters():
            noise = torch.randn(one.shape, generator=generator)
            one.data = noise * one.shape[-1] ** -0.5 if one.dim() > 1 else one + 0.2 * noise
        return model.eval()

    def alone(self, model: PreTrainedModel) -> torch.Tensor:
        """Log-probs [M] of the response tokens, each row computed alone, by the head's own weight."""
        return torch.cat(
            [_log_probs(model, packed_rows([row], torch.device("cpu"))) for row in self.rows]
        )


def own_log_probs(
    model: PreTrainedModel, rows: Sequence[tuple[list[int], list[int]]]
) -> torch.Tensor:
    """Log-probs [M] of the response tokens of rows that transformers' own forward computes one at a time."""
    found = []
    for prompt, response in rows:
        tokens = torch.tensor([prompt + response], device=model.device)
        log_probs = model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
        found.append(
            log_probs[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        )
    return torch.cat(found)


def _log_probs(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """[M] of the targets."""
    options = {"attention_plan": batch.plan} if is_packed(model) else {}
    body, head = backbone(model), head_of(model)
    states = body(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        use_cache=False,
        **options,
    ).last_hidden_state[0]
    logits = LogitRule.of(model.config).apply(head(states[batch.predictors]).float())
    return logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    off = float((one - other).abs().max())
    return off if off == off else float("inf")
