# SPDX-License-Identifier: Apache-2.0
"""The model as generation computes it: from tokens to hidden states, and from these to logits.

The decoders in `PLAIN` are computed here, layer by layer, with the arithmetic of training and about half the
operations: query, key and value come from one product, and so do gate and up. Other models compute by their own module,
whose linear modules and experts take their products from here meanwhile. The tokens of a mixture of experts are sorted
by expert, and each expert that was chosen computes its own.

On a CPU the weights are copied into the forms of `products`, elsewhere those of query, key and value side by side.
`Network.state` identifies the parameters that were copied; after an update the engine makes a new network.

Legend: B rows, N tokens, D hidden size, H query heads, K key-value heads, d head size, F width of the MLP or of an
expert, E experts of a layer, k of them for each token, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone, head_of
from quadriga.models.attention import AttentionOptions, AttentionPlan
from quadriga.models.experts import is_mixture, mixtures
from quadriga.models.fused import rms_scale
from quadriga.models.heads import HALF_DTYPES, HAS_TRITON, LogitRule, head_logits, launches_triton
from quadriga.models.vision import ImageTokens, PackedImages, decoder_inputs
from quadriga.partition import part_of
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.native.kernels import Kernels, about_kernels, kernels
from quadriga.rollout.native.products import Forms, Weight
from quadriga.weight_sync.reshard import Piece

if HAS_TRITON:
    from quadriga.rollout.native.kernels_triton import TritonKernels

PLAIN = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "MistralForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip

_WINDOW_IN_CONFIG = ("MistralAttention", "MixtralAttention")

State = tuple[tuple[int, int], ...]


class TorchElementwise:
    """Norms, rotary positions and gates by torch's operators, which round to bfloat16 after each, as in training.

    `Kernels` and `TritonKernels` compute the same in one pass each. All tensors have the model's dtype.
    """

    def normalize(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm of [..., D] over the last dim, times `weight` [D]."""
        wide = states.float()
        return (wide * rms_scale(wide, epsilon)).to(states.dtype) * weight

    def add_and_normalize(
        self, states: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of [..., D] and [..., D], which may take the memory of the second, and its norm."""
        states = states + added
        return states, self.normalize(states, weight, epsilon)

    def rotate(self, states: Tensor, num_turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of the first heads of [..., H, d], by `cos` and `sin` [..., d]."""
        turning, left = states.split((num_turned, states.shape[-2] - num_turned), -2)
        first, second = turning.chunk(2, -1)
        swapped = torch.cat((-second, first), -1).mul_(sin.unsqueeze(-2))
        return torch.cat(((turning * cos.unsqueeze(-2)).add_(swapped), left), -2)

    def gate(self, states: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2 * F], the gate first -> [..., F]."""
        gate, up = states.chunk(2, -1)
        return silu(gate).mul_(up)


Elementwise: TypeAlias = "TorchElementwise | Kernels | TritonKernels"


class Network:
    """A causal model of transformers with our attention, by its own module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.image_tokens = model, ImageTokens.of(model.config)
        self.body, self.head = cast(Any, backbone(model)), cast(Any, head_of(model))
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self.device: torch.device = self.head.weight.device
        self.state = state_of(model)
        self.rule, self.forms = LogitRule.of(model.config), _forms_for(model)
        self.exact_head: Weight | None = None
        self.products: dict[nn.Module, Callable[..., Tensor]] = {}
        if self.forms is not None:
            bias = getattr(self.head, "bias", None)
            biases = None if bias is None else [bias.detach()]
            self.exact_head = self.forms.make([self.head.weight.detach()], biases, is_head=True)
            self._take_products(self.forms)

    def _take_products(self, forms: Forms) -> None:
        """Of the linear modules and experts below the head, but those that somebody else leads."""
        for module in self.body.modules() if forms.many is not None else ():
            if "forward" in vars(module):
                continue
            if type(module) is nn.Linear:
                self.products[module] = _Projection([module], forms)
            elif getattr(module, "has_gate", False):  # so transformers marks experts
                self.products[module] = _Experts(module, forms, cast(Any, module)._apply_gate)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        images: PackedImages | None = None,
        *,
        plan: AttentionPlan,
    ) -> Tensor:
        """[B, N] tokens and positions -> [B, N, D]; positions may be [3, B, N], and with images B is 1."""
        inputs = (
            {"input_ids": tokens} if images is None else decoder_inputs(self.model, tokens, images)
        )
        inputs |= {"position_ids": positions, "attention_mask": None, "attention_plan": plan}
        try:
            for module, product in self.products.items():
                vars(module)["forward"] = product
            return self.body(**inputs, use_cache=False).last_hidden_state
        finally:
            for module in self.products:
                vars(module).pop("forward", None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, D] -> [B, V] float32, equal to those of training."""
        if self.exact_head is not None:
            return self.rule.apply(self.exact_head.multiply(hidden))
        return self.rule.apply(
            head_logits(hidden, self.head.weight, getattr(self.head, "bias", None))
        )


class PlainNetwork(Network):
    """A decoder of the plain kind, computed here; with a group the share of one rank, by tensor parallelism.

    A rank has some of the heads, of the MLP's width, and of the vocabulary (`shards_of`). What attention and MLP add
    to the hidden states is summed over the ranks, and the logits are joined: all ranks have the same bits of both.
    """

    def __init__(self, model: PreTrainedModel, group: RolloutGroup | None = None) -> None:
        super().__init__(model)
        self.group, forms, config = group, self.forms, model.config.get_text_config()
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        mlps = [layer.mlp for layer in self.body.layers]
        widths = {
            part_of(config.intermediate_size, size, rank)[1] for mlp in mlps if not is_mixture(mlp)
        }
        widths |= {mlp.experts.intermediate_dim for mlp in mlps if is_mixture(mlp)}
        self.vocabulary_size, (self.first_token, _) = (
            config.vocab_size,
            part_of(config.vocab_size, size, rank),
        )
        sizes = (config.hidden_size, *widths, self.body.layers[0].self_attn.head_dim)
        dtypes = {parameter.dtype for parameter in self.body.parameters()}
        is_taken = self.device.type == "cpu" and dtypes in ({torch.bfloat16}, {torch.float32})
        loops = kernels() if is_taken and Kernels.can_compute(*sizes) else None
        self.elementwise: Elementwise = TorchElementwise() if loops is None else loops
        if len(dtypes) == 1 and dtypes <= {*HALF_DTYPES} and launches_triton(self.device):
            self.elementwise = TritonKernels()
        made = (forms, self.elementwise, group)
        self.layers = [
            _Layer(layer, number, *made) for number, layer in enumerate(self.body.layers)
        ]

    def _take_products(self, forms: Forms) -> None:
        """Its layers have them side by side."""

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        images: PackedImages | None = None,
        *,
        plan: AttentionPlan,
    ) -> Tensor:
        if images is None:
            hidden = self._embedded(tokens)
        else:
            hidden = decoder_inputs(self.model, tokens, images)["inputs_embeds"]
        cos, sin = self.body.rotary_emb(hidden, position_ids=positions)
        cos, sin = cos.contiguous(), sin.contiguous()
        added = None
        for layer in self.layers:
            hidden, added = layer(hidden, added, cos, sin, plan)
        norm = self.body.norm
        return self.elementwise.add_and_normalize(
            hidden, added, norm.weight, norm.variance_epsilon
        )[1]

    def logits(self, hidden: Tensor) -> Tensor:
        own = super().logits(hidden)
        return own if self.group is None else self.group.join(own, self.vocabulary_size)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[B, N] -> [B, N, D]; a rank has the rows of some tokens, and adds zeros for the others."""
        table = self.body.embed_tokens.weight
        if self.group is None:
            return embedding(tokens, table)
        local = tokens - self.first_token
        is_here = (local >= 0) & (local < len(table))
        return self.group.add_up(
            embedding(torch.where(is_here, local, 0), table) * is_here[..., None]
        )


class _Layer:
    """One layer of a plain decoder."""

    def __init__(
        self,
        layer: Any,
        number: int,
        forms: Forms | None,
        elementwise: Elementwise,
        group: RolloutGroup | None,
    ) -> None:
        self.number, self.elementwise = number, elementwise
        attention = layer.self_attn
        self.head_size, self.scale = attention.head_dim, attention.scaling
        # Mistral and Mixtral have the window of all layers in the configuration, and alone read it there.
        has_own = (
            hasattr(attention, "sliding_window")
            or type(attention).__name__ not in _WINDOW_IN_CONFIG
        )
        window = getattr(attention if has_own else attention.config, "sliding_window", None)
        self.options = AttentionOptions(window=window or None)
        size = 1 if group is None else group.size
        self.num_key_heads = max(1, attention.config.num_key_value_heads // size)
        self.num_heads = attention.config.num_attention_heads // size
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if hasattr(attention, "q_norm"):
            norms += [attention.q_norm, attention.k_norm]
        self.first_norm, self.second_norm, *head_norms = [
            (norm.weight, norm.variance_epsilon) for norm in norms
        ]
        self.head_norms = head_norms or None
        self.project = _Projection(
            (attention.q_proj, attention.k_proj, attention.v_proj), forms, packs=True
        )
        self.merge = _Projection((attention.o_proj,), forms, group)
        made = _Mixture if is_mixture(layer.mlp) else _MLP
        self.mlp = made(layer.mlp, forms, elementwise, group)

    def __call__(
        self, hidden: Tensor, added: Tensor | None, cos: Tensor, sin: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """`hidden` [B, N, D], without what the layer before adds to it, and what this one adds: a norm sums both.
        `cos` and `sin` are [B, N, d]."""
        heads, keys, normalize = self.num_heads, self.num_key_heads, self.elementwise.normalize
        if added is None:
            states = normalize(hidden, *self.first_norm)
        else:
            hidden, states = self.elementwise.add_and_normalize(hidden, added, *self.first_norm)
        states = self.project(states).unflatten(-1, (-1, self.head_size))
        if self.head_norms is not None:
            query, key, value = states.split((heads, keys, keys), 2)
            query_norm, key_norm = self.head_norms
            states = torch.cat((normalize(query, *query_norm), normalize(key, *key_norm), value), 2)
        states = self.elementwise.rotate(states, heads + keys, cos, sin).transpose(1, 2)
        query, key, value = states.split((heads, keys, keys), 1)
        mixed = plan.attend(self.number, query, key, value, self.scale, self.options)
        merged = self.merge(mixed.flatten(2))
        hidden, states = self.elementwise.add_and_normalize(hidden, merged, *self.second_norm)
        return hidden, self.mlp(states)


class _MLP:
    """A gated MLP, or the share of a rank in one."""

    def __init__(
        self,
        mlp: Any,
        forms: Forms | None,
        elementwise: Elementwise,
        group: RolloutGroup | None = None,
    ) -> None:
        self.elementwise = elementwise
        self.widen = _Projection((mlp.gate_proj, mlp.up_proj), forms)
        self.narrow = _Projection((mlp.down_proj,), forms, group)

    def __call__(self, states: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]"""
        return self.narrow(self.elementwise.gate(self.widen(states)))


class _Mixture:
    """A router and its experts, perhaps with one that all tokens share."""

    def __init__(
        self,
        mlp: Any,
        forms: Forms | None,
        elementwise: Elementwise,
        group: RolloutGroup | None = None,
    ) -> None:
        assert group is None, "a group's experts are not divided"
        self.router, self.experts = mlp.gate, mlp.experts
        self.shared = (
            _MLP(mlp.shared_expert, forms, elementwise) if hasattr(mlp, "shared_expert") else None
        )
        self.share = getattr(mlp, "shared_expert_gate", None)
        if forms is not None and forms.many is not None:
            self.experts = _Experts(mlp.experts, forms, elementwise.gate)

    def __call__(self, states: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]"""
        rows = states.flatten(0, 1)
        _, scores, chosen = self.router(rows)  # [B N, k] each
        mixed = self.experts(rows, chosen, scores).view_as(states)
        if self.shared is None or self.share is None:
            return mixed
        return mixed + torch.sigmoid(self.share(states)) * self.shared(states)


class _Experts:
    """The experts of a layer, as the module that transformers has them in; `gate` is theirs: [R, 2 F] -> [R, F]."""

    def __init__(self, experts: Any, forms: Forms, gate: Callable[[Tensor], Tensor]) -> None:
        self.gate, self.sides = gate, list[list[Weight]]()
        for name in ("gate_up_proj", "down_proj"):
            weights, biases = getattr(experts, name).detach(), [None] * len(getattr(experts, name))
            if experts.has_bias:
                biases = [[one] for one in getattr(experts, f"{name}_bias").detach()]
            pairs = zip(weights.mT if experts.is_transposed else weights, biases, strict=True)
            self.sides.append(
                [one for weight, bias in pairs if (one := forms.make([weight.contiguous()], bias))]
            )

    def __call__(self, rows: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """[R, D] of all tokens, and [R, k] twice -> [R, D]."""
        wide, narrow = self.sides
        by_expert = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(wide)).tolist()
        states = rows[by_expert // chosen.shape[1]]
        for weights in (wide, narrow):
            parts = zip(weights, states.split(counts), strict=True)
            states = torch.cat(
                [weight.multiply(own).to(rows.dtype) for weight, own in parts if len(own)]
            )
            states = self.gate(states) if weights is wide else states
        outputs = torch.empty_like(states).index_copy_(0, by_expert, states)
        return (outputs.view(*chosen.shape, -1) * scores[..., None]).sum(1).to(rows.dtype)


class _Projection:
    """Linear modules with one input, their outputs side by side; with a group, their sum over its ranks, of which each
    has some columns. On CUDA a copy of the weights side by side, if it `packs` them, makes it one product."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        forms: Forms | None,
        summed_over: RolloutGroup | None = None,
        *,
        packs: bool = False,
    ) -> None:
        self.modules, self.group = modules, summed_over
        self.weight: Weight | None = None
        plain = [module for module in modules if type(module) is nn.Linear]
        self.factors: list[tuple[Tensor, Tensor | None]] = []
        if len(plain) == len(modules) > 1 and forms is None:
            self.factors = [
                (one.weight.detach(), None if one.bias is None else one.bias.detach())
                for one in plain
            ]
            if packs and len({bias is None for _, bias in self.factors}) == 1:
                weights, biases = zip(*self.factors, strict=True)
                self.factors = [
                    (torch.cat(weights), None if biases[0] is None else torch.cat(biases))
                ]
        if (
            forms is not None
            and len(plain) == len(modules)
            and len({module.bias is None for module in plain}) == 1
        ):
            biases = None if plain[0].bias is None else [module.bias.detach() for module in plain]
            if self.group is not None and not self.group.is_leader:
                biases = None  # it is added once
            weights = [module.weight.detach() for module in plain]
            self.weight = forms.make(weights, biases, is_sum=self.group is not None)

    def __call__(self, states: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, O]"""
        if self.weight is not None:
            product = self.weight.multiply(states)
            return (product if self.group is None else self.group.add_up(product.float())).to(
                states.dtype
            )
        if self.group is not None:
            (module,) = cast(Any, self.modules)
            return self.group.add_up(
                linear(states, module.weight, module.bias if self.group.is_leader else None)
            )
        if len(self.factors) == 1:
            return linear(states, *self.factors[0])
        if not self.factors:
            outputs = [module(states) for module in self.modules]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        rows, widths = states.flatten(0, -2).detach(), [len(weight) for weight, _ in self.factors]
        result = rows.new_empty(len(rows), sum(widths))
        for (weight, bias), part in zip(self.factors, result.split(widths, 1), strict=True):
            if bias is None:
                torch.mm(rows, weight.mT, out=part)
            else:
                torch.addmm(bias, rows, weight.mT, out=part)
        return result.unflatten(0, states.shape[:-1])


def description_of(model: PreTrainedModel) -> str:
    """How a model is computed, and which copies of its weights that takes."""
    forms = _forms_for(model)
    how = "layer by layer" if is_plain(model) else "by the model's own module"
    if found := [*mixtures(model)]:
        by_loop = (
            forms is not None
            and forms.many is not None
            and all(getattr(one.experts, "has_gate", False) for one in found)
        )
        how += (
            ", experts in a loop over those that tokens chose"
            if by_loop
            else ", experts as the module has them"
        )
    if forms is None:
        return how
    return f"{how}{forms.description}; {about_kernels()}"


def _forms_for(model: PreTrainedModel) -> Forms | None:
    weight = cast(Any, head_of(model)).weight
    if weight.device.type != "cpu":
        return None
    return Forms(weight.dtype, sum(one.numel() for one in model.parameters()))


def is_plain(model: PreTrainedModel) -> bool:
    """Whether its layers are norms, attention, perhaps in a window, and MLPs gated by SiLU or mixtures of such."""
    config = model.config.get_text_config()
    if type(model).__name__ not in PLAIN or getattr(config, "hidden_act", None) != "silu":
        return False
    return getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)


def state_of(model: nn.Module) -> State:
    """Where each parameter is and how often it was written to in place, as far as torch counts."""
    return tuple(
        (one.data_ptr(), 0 if one.is_inference() else one._version) for one in model.parameters()
    )


def shards_of(model: PreTrainedModel, group: RolloutGroup) -> dict[str, Piece]:
    """By name the part of each parameter of a model, which may be on "meta", that a rank of a group has (tensor
    parallelism, arXiv:1909.08053): rows of some heads (with fewer key-value heads than ranks several have the same),
    columns of `o_proj` of the same heads, rows of some of the MLP's width and columns of `down_proj`, rows of some of
    the vocabulary. Norms and `o_proj.bias` are whole on every rank."""
    config, rank, size = model.config.get_text_config(), group.rank, group.size
    num_heads, num_keys = config.num_attention_heads, config.num_key_value_heads
    head_size = model.base_model.layers[0].self_attn.head_dim
    heads, keys = num_heads // size * head_size, max(1, num_keys // size) * head_size
    query = rank * heads, heads
    key = rank * num_keys // size * head_size, keys
    width, vocabulary = (
        part_of(config.intermediate_size, size, rank),
        part_of(config.vocab_size, size, rank),
    )
    cuts: dict[str, tuple[int, tuple[int, int]]] = {
        "q_proj.weight": (0, query), "q_proj.bias": (0, query), "o_proj.weight": (1, query),
        "k_proj.weight": (0, key), "k_proj.bias": (0, key), "v_proj.weight": (0, key), "v_proj.bias": (0, key),
        "gate_proj.weight": (0, width), "gate_proj.bias": (0, width), "down_proj.weight": (1, width),
        "up_proj.weight": (0, width), "up_proj.bias": (0, width),
        "embed_tokens.weight": (0, vocabulary), "lm_head.weight": (0, vocabulary), "lm_head.bias": (0, vocabulary),
    }  # fmt: skip
    found = {}
    for name, parameter in model.named_parameters():
        start, shape = [0] * parameter.dim(), list(parameter.shape)
        if (cut := cuts.get(".".join(name.split(".")[-2:]))) is not None:
            dim, (start[dim], shape[dim]) = cut[0], cut[1]
        found[name] = Piece(tuple(start), tuple(shape))
    return found
