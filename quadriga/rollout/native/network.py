# SPDX-License-Identifier: Apache-2.0
"""The model as generation computes it: from tokens to hidden states, and from these to logits.

The decoders in `PLAIN` are computed here, layer by layer, with the arithmetic of training and about
half the operations: query, key and value come from one product, and so do gate and up. Other models
are computed by their own module, whose linear modules and experts are replaced during the call. In
a mixture of experts, tokens are sorted by expert, and each chosen expert computes its own tokens.

On a CPU all weights are copied into forms that are faster to multiply (`products.py`). On a GPU the
weights of query, key and value are copied side by side. `Network.state` identifies the parameters
that were copied. After an update the engine makes a new network.

Legend: B rows, N tokens, D hidden size, H query heads, K key-value heads, d head size, F width of
the MLP or of an expert, E experts of a layer, k of them for each token, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone, head_of
from quadriga.models.attention import AttentionOptions, AttentionPlan
from quadriga.models.experts import is_mixture, mixtures
from quadriga.models.fused import rms_scale
from quadriga.models.heads import HALF_DTYPES, HAS_TRITON, LogitRule, can_launch_triton, head_logits
from quadriga.models.vision import ImageTokens, PackedImages, decoder_inputs
from quadriga.partition import part_of
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.native.kernels import Kernels, about_kernels, kernels
from quadriga.rollout.native.products import Forms, Weight
from quadriga.weight_sync.reshard import Box

if HAS_TRITON:
    from quadriga.rollout.native.kernels_triton import TritonKernels

PLAIN = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)

# Attention classes without an attribute for the window: all layers have the configuration's.
_WINDOW_IN_CONFIG = ("MistralAttention", "MixtralAttention")

State = tuple[tuple[int, int], ...]
"""Address and number of writes of each parameter; see `state_of`."""


class TorchElementwise:
    """Norms, rotary positions and gates by torch's operators, rounded after each as in training.

    `Kernels` and `TritonKernels` have the same methods, which compute the same numbers in one pass
    each. All tensors have the model's dtype.
    """

    def normalize(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute the root-mean-square norm over the last dimension, times `weight`.

        Args:
            states: [..., D].
            weight: [D].
            epsilon: added to the mean square.

        Returns:
            [..., D].
        """
        # Round before the weight is applied, as transformers does.
        wide = states.float()
        return (wide * rms_scale(wide, epsilon)).to(states.dtype) * weight

    def add_and_normalize(
        self, states: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Add two tensors, and compute the root-mean-square norm of the sum, times `weight`.

        Args:
            states: [..., D].
            added: [..., D]; other implementations may overwrite it with the sum.
            weight: [D].
            epsilon: added to the mean square.

        Returns:
            The sum and its norm, [..., D] each.
        """
        states = states + added
        return states, self.normalize(states, weight, epsilon)

    def rotate(self, states: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary positions to the first heads.

        Args:
            states: [..., H, d].
            num_rotated: number of heads to rotate.
            cos: [..., d].
            sin: [..., d].

        Returns:
            [..., H, d].
        """
        num_heads = states.shape[-2]
        turned, unturned = states.split((num_rotated, num_heads - num_rotated), -2)
        # The halves x, y of a head become x * cos - y * sin and y * cos + x * sin.
        first, second = turned.chunk(2, -1)
        swapped = torch.cat((-second, first), -1).mul_(sin.unsqueeze(-2))
        rotated = (turned * cos.unsqueeze(-2)).add_(swapped)
        return torch.cat((rotated, unturned), -2)

    def gate(self, states: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2 * F], gate first -> [..., F]."""
        gate, up = states.chunk(2, -1)
        return silu(gate).mul_(up)


Elementwise: TypeAlias = "TorchElementwise | Kernels | TritonKernels"


class Network:
    """A causal model of transformers, computed by its own module.

    Args:
        model: a model that was loaded with our attention.

    Attributes:
        state: identifies the parameters that the network was made from; see `state_of`.
        body: the decoder without the head.
        head: the linear module that makes logits.
        rule: how logits follow from the head's product, such as a softcap.
        forms: chooses the forms of the weights on a CPU; None on other devices.
        exact_head: the head's weight in these forms, with logits in float32; None: `forms` is None,
            or has no form for the dtype.
        products: by linear module or module of experts: what replaces its `forward` in `hidden`.
        group: the ranks that hold the model together; None: this process holds all of it.
    """

    group: RolloutGroup | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.image_tokens = ImageTokens.of(model.config)
        self.body = cast(Any, backbone(model))
        self.head = cast(Any, head_of(model))
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self.device: torch.device = self.head.weight.device
        self.state = state_of(model)
        self.rule = LogitRule.of(model.config)
        self.forms = _forms_for(model)
        self.exact_head: Weight | None = None
        self.products: dict[nn.Module, Callable[..., Tensor]] = {}
        if self.forms is not None:
            bias = getattr(self.head, "bias", None)
            biases = None if bias is None else [bias.detach()]
            self.exact_head = self.forms.make([self.head.weight.detach()], biases, is_head=True)
            self._make_products(self.forms)

    def _make_products(self, forms: Forms) -> None:
        """Fill `products` for the linear modules and the modules of experts of `body`."""
        # There are no forms for this dtype: the modules multiply by themselves.
        if forms.many is None:
            return
        for module in self.body.modules():
            # Leave a module alone whose `forward` somebody else has replaced.
            if "forward" in vars(module):
                continue
            if type(module) is nn.Linear:
                self.products[module] = _Projection([module], forms)
            # transformers marks modules of experts by this attribute.
            elif getattr(module, "has_gate", False):
                self.products[module] = _NativeExperts(module, forms, cast(Any, module)._apply_gate)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        images: PackedImages | None = None,
        *,
        plan: AttentionPlan,
    ) -> Tensor:
        """Compute the hidden states of the last layer.

        Args:
            tokens: [B, N]. With images B is 1.
            positions: [B, N], or [3, B, N] for time, height and width.
            images: images of the packed prompts.
            plan: computes attention.

        Returns:
            [B, N, D].
        """
        inputs: dict[str, Any] = {"input_ids": tokens}
        if images is not None:
            inputs = decoder_inputs(self.model, tokens, images)
        inputs |= {"position_ids": positions, "attention_mask": None, "attention_plan": plan}
        # An attribute of the module hides the `forward` of its class, only during this call.
        try:
            for module, product in self.products.items():
                vars(module)["forward"] = product
            return self.body(**inputs, use_cache=False).last_hidden_state
        finally:
            for module in self.products:
                vars(module).pop("forward", None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits as training does: [B, D] -> [B, V] float32."""
        if self.exact_head is not None:
            return self.rule.apply(self.exact_head.multiply(hidden))
        bias = getattr(self.head, "bias", None)
        return self.rule.apply(head_logits(hidden, self.head.weight, bias))


class PlainNetwork(Network):
    """A decoder in `PLAIN`, computed layer by layer.

    In a rollout group each rank computes a share of it (tensor parallelism): some of the heads, a
    part of the MLP's width, and some tokens of the vocabulary; see `shard_boxes`. The outputs of
    attention and MLP are summed over the ranks, and the logits are joined. All ranks get the same
    bits.

    Args:
        model: a model of these architectures, loaded with our attention.
        group: the ranks that hold the model together; None: this process holds all of it.

    Attributes:
        first_token: id of the first token whose embedding and logit this rank computes.
        elementwise: computes norms, rotary positions and gates.
    """

    def __init__(self, model: PreTrainedModel, group: RolloutGroup | None = None) -> None:
        super().__init__(model)
        self.group = group
        rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
        config = model.config.get_text_config()
        self.vocabulary_size = config.vocab_size
        self.first_token, _ = part_of(config.vocab_size, num_ranks, rank)

        self.elementwise = self._choose_elementwise(num_ranks, rank)
        self.layers = [
            _Layer(layer, number, self.forms, self.elementwise, group)
            for number, layer in enumerate(self.body.layers)
        ]

    def _choose_elementwise(self, num_ranks: int, rank: int) -> Elementwise:
        """Choose the fastest norms, rotary positions and gates for this model and device.

        Args:
            num_ranks: size of the rollout group, which shares the intermediate size of MLPs.
            rank: rank in that group.
        """
        dtypes = {parameter.dtype for parameter in self.body.parameters()}
        if len(dtypes) > 1:
            return TorchElementwise()
        [dtype] = dtypes
        if dtype in HALF_DTYPES and can_launch_triton(self.device):
            return TritonKernels()
        if self.device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
            return TorchElementwise()
        loops = kernels()
        # The loops need sizes that are multiples of a vector.
        config = self.model.config.get_text_config()
        sizes = {config.hidden_size, self.body.layers[0].self_attn.head_dim}
        for layer in self.body.layers:
            if is_mixture(layer.mlp):
                sizes.add(layer.mlp.experts.intermediate_dim)
            else:
                _, mlp_width = part_of(config.intermediate_size, num_ranks, rank)
                sizes.add(mlp_width)
        if loops is None or not Kernels.can_compute(*sizes):
            return TorchElementwise()
        return loops

    def _make_products(self, forms: Forms) -> None:
        """Do nothing: `_Layer` converts the weights, and joins weights with the same input."""

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        images: PackedImages | None = None,
        *,
        plan: AttentionPlan,
    ) -> Tensor:
        """Compute the hidden states of the last layer, like `Network.hidden`, layer by layer.

        Args:
            tokens: [B, N]. With images B is 1.
            positions: [B, N], or [3, B, N] for time, height and width.
            images: images of the packed prompts.
            plan: computes attention.
        """
        if images is None:
            hidden = self._embed_tokens(tokens)
        else:
            hidden = decoder_inputs(self.model, tokens, images)["inputs_embeds"]
        cos, sin = self.body.rotary_emb(hidden, position_ids=positions)
        # The kernels get only addresses, without strides.
        cos = cos.contiguous()
        sin = sin.contiguous()
        # Each layer returns its last output as `added`. The next norm adds it in the same pass.
        added = None
        for layer in self.layers:
            hidden, added = layer(hidden, added, cos, sin, plan)
        norm = self.body.norm
        _, normed = self.elementwise.add_and_normalize(
            hidden, added, norm.weight, norm.variance_epsilon
        )
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [B, D] -> [B, V] float32. Ranks of a group compute a part each."""
        logits = super().logits(hidden)
        if self.group is None:
            return logits
        return self.group.all_gather_columns(logits, self.vocabulary_size)

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [B, N] -> [B, N, D]. A rank of a group only has some tokens' embeddings."""
        table = self.body.embed_tokens.weight
        if self.group is None:
            return embedding(tokens, table)
        # The embedding of another rank's token is zero here, so the sum over the ranks is exact.
        local = tokens - self.first_token
        is_local = (local >= 0) & (local < len(table))
        rows = embedding(torch.where(is_local, local, 0), table)
        return self.group.all_reduce(rows * is_local[..., None])


class _NormWeights(NamedTuple):
    """Weight [D] and epsilon of a root-mean-square norm."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "_NormWeights":
        """Take weight and epsilon of a norm of transformers."""
        return cls(module.weight, module.variance_epsilon)


class _Layer:
    """A layer of a plain decoder, or a rank's share of it.

    Args:
        layer: transformers' module of the layer.
        number: number of the layer.
        forms: forms of the weights on a CPU; None on other devices.
        elementwise: computes norms, rotary positions and gates.
        group: the ranks that share the layer; None: this process computes all of it.
    """

    def __init__(
        self,
        layer: Any,
        number: int,
        forms: Forms | None,
        elementwise: Elementwise,
        group: RolloutGroup | None,
    ) -> None:
        self.number = number
        self.elementwise = elementwise
        attention = layer.self_attn
        self.head_size = attention.head_dim
        self.scale = attention.scaling
        self.options = AttentionOptions(window=window_of(attention))

        # A rank of a group has some of the heads, at least one of the key-value heads.
        num_ranks = 1 if group is None else group.size
        self.num_heads = attention.config.num_attention_heads // num_ranks
        self.num_key_heads = max(1, attention.config.num_key_value_heads // num_ranks)

        self.first_norm = _NormWeights.of(layer.input_layernorm)
        self.second_norm = _NormWeights.of(layer.post_attention_layernorm)
        self.head_norms: tuple[_NormWeights, _NormWeights] | None = None  # of queries and of keys
        if hasattr(attention, "q_norm"):
            self.head_norms = (_NormWeights.of(attention.q_norm), _NormWeights.of(attention.k_norm))

        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv_projection = _Projection(inputs, forms, packs=True)
        self.output_projection = _Projection((attention.o_proj,), forms, group)
        mlp_class = _Mixture if is_mixture(layer.mlp) else _MLP
        self.mlp = mlp_class(layer.mlp, forms, elementwise, group)

    def __call__(
        self, hidden: Tensor, added: Tensor | None, cos: Tensor, sin: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer, up to the sum after its MLP, which the next norm computes.

        Args:
            hidden: [B, N, D], the residual stream before the output of the last MLP is added.
            added: [B, N, D], the output of the last MLP; None in the first layer.
            cos: [B, N, d].
            sin: [B, N, d].
            plan: computes attention.

        Returns:
            The residual stream, and the output of this layer's MLP, to be added: `hidden` and
            `added` of the next layer.
        """
        normalize = self.elementwise.normalize
        add_and_normalize = self.elementwise.add_and_normalize
        num_heads = self.num_heads
        num_key_heads = self.num_key_heads
        sizes = (num_heads, num_key_heads, num_key_heads)
        if added is None:
            states = normalize(hidden, *self.first_norm)
        else:
            hidden, states = add_and_normalize(hidden, added, *self.first_norm)

        # Heads of queries, keys and values, side by side: [B, N, H + 2 K, d].
        heads = self.qkv_projection(states).unflatten(-1, (-1, self.head_size))
        if self.head_norms is not None:
            query_norm, key_norm = self.head_norms
            query, key, value = heads.split(sizes, 2)
            query = normalize(query, *query_norm)
            key = normalize(key, *key_norm)
            heads = torch.cat((query, key, value), 2)
        # Queries and keys are rotated, values are not.
        heads = self.elementwise.rotate(heads, num_heads + num_key_heads, cos, sin)
        query, key, value = heads.transpose(1, 2).split(sizes, 1)
        mixed = plan.attend(self.number, query, key, value, self.scale, self.options)
        output = self.output_projection(mixed.flatten(2))

        hidden, states = add_and_normalize(hidden, output, *self.second_norm)
        return hidden, self.mlp(states)


def window_of(attention: Any) -> int | None:
    """Width of an attention module's sliding window in tokens; None: it sees all tokens."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or None
    # Other architectures may have a window in their configuration that they do not use.
    if type(attention).__name__ in _WINDOW_IN_CONFIG:
        return getattr(attention.config, "sliding_window", None) or None
    return None


class _MLP:
    """A gated MLP, or a rank's share of it.

    Args:
        mlp: transformers' module.
        forms: forms of the weights on a CPU; None on other devices.
        elementwise: computes the gate of an MLP.
        group: the ranks that share the MLP; None: this process computes all of it.
    """

    def __init__(
        self,
        mlp: Any,
        forms: Forms | None,
        elementwise: Elementwise,
        group: RolloutGroup | None = None,
    ) -> None:
        self.elementwise = elementwise
        self.gate_up_projection = _Projection((mlp.gate_proj, mlp.up_proj), forms)
        self.down_projection = _Projection((mlp.down_proj,), forms, group)

    def __call__(self, states: Tensor) -> Tensor:
        """Compute the MLP: [B, N, D] -> [B, N, D]."""
        return self.down_projection(self.elementwise.gate(self.gate_up_projection(states)))


class _Mixture:
    """A router and its experts; in some models also an expert that all tokens share.

    Args:
        mlp: transformers' module.
        forms: forms of the weights on a CPU; None on other devices.
        elementwise: computes the gate of an MLP.
        group: must be None, because experts are not divided over ranks.
    """

    def __init__(
        self,
        mlp: Any,
        forms: Forms | None,
        elementwise: Elementwise,
        group: RolloutGroup | None,
    ) -> None:
        assert group is None, "the experts of a rollout group are not sharded"
        self.router = mlp.gate
        self.experts = mlp.experts
        if forms is not None and forms.many is not None:
            self.experts = _NativeExperts(mlp.experts, forms, elementwise.gate)
        self.shared_expert: _MLP | None = None
        if hasattr(mlp, "shared_expert"):
            self.shared_expert = _MLP(mlp.shared_expert, forms, elementwise)
        self.shared_gate = getattr(mlp, "shared_expert_gate", None)

    def __call__(self, states: Tensor) -> Tensor:
        """Compute the mixture of chosen experts, and a shared one: [B, N, D] -> [B, N, D]."""
        rows = states.flatten(0, 1)
        _, scores, chosen = self.router(rows)  # [B * N, k] each: weights and numbers of experts
        mixed = self.experts(rows, chosen, scores).view_as(states)
        if self.shared_expert is None or self.shared_gate is None:
            return mixed
        return mixed + torch.sigmoid(self.shared_gate(states)) * self.shared_expert(states)


class _NativeExperts:
    """The experts of a layer, in a loop. Called like transformers' module of experts.

    Args:
        experts: transformers' module.
        forms: forms of the weights on a CPU.
        gate: combines both halves of the first product of an expert: [R, 2 F] -> [R, F].
    """

    def __init__(self, experts: Any, forms: Forms, gate: Callable[[Tensor], Tensor]) -> None:
        self.gate = gate
        self.gate_up_weights = _expert_weights(experts, "gate_up_proj", forms)
        self.down_weights = _expert_weights(experts, "down_proj", forms)

    def __call__(self, rows: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Compute the chosen experts of each token, weighted by their scores.

        Args:
            rows: [R, D].
            chosen: [R, k], numbers of the experts.
            scores: [R, k], weight of each chosen expert.

        Returns:
            [R, D].
        """
        # Sort the k copies of each token by their expert, so that each expert has a range of rows.
        by_expert = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.gate_up_weights)).tolist()
        # Copy number i belongs to token i // k.
        states = rows[by_expert // chosen.shape[1]]
        states = self.gate(_multiply_by_expert(self.gate_up_weights, states, counts))
        states = _multiply_by_expert(self.down_weights, states, counts)
        # Move the outputs back to the order of the tokens.
        outputs = torch.empty_like(states).index_copy_(0, by_expert, states)
        weighted = outputs.view(*chosen.shape, -1) * scores[..., None]
        return weighted.sum(1).to(rows.dtype)


def _expert_weights(experts: Any, name: str, forms: Forms) -> list[Weight]:
    """Convert the weights of all experts to the forms of a CPU.

    Args:
        experts: transformers' module.
        name: name of the parameter with the weights of all experts, [E, ...].
        forms: forms of the weights.

    Returns:
        The weight of each expert; [] if `forms` has none.
    """
    parameters = getattr(experts, name).detach()
    # Some models store weights as [inputs, outputs]; the forms take [outputs, inputs].
    if experts.is_transposed:
        parameters = parameters.mT
    weights = []
    for number, parameter in enumerate(parameters):
        biases = None
        if experts.has_bias:
            biases = [getattr(experts, f"{name}_bias").detach()[number]]
        weight = forms.make([parameter.contiguous()], biases)
        if weight is not None:
            weights.append(weight)
    return weights


def _multiply_by_expert(weights: Sequence[Weight], states: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply each row with the weight of its expert.

    Args:
        weights: the weight of each expert.
        states: [R, D], sorted by expert.
        counts: number of rows of each expert.

    Returns:
        [R, outputs].
    """
    products = []
    for weight, rows in zip(weights, states.split(counts), strict=True):
        # With few rows, many experts have no token.
        if len(rows):
            products.append(weight.multiply(rows).to(states.dtype))
    return torch.cat(products)


class _Projection:
    """Linear modules with the same input, and their outputs side by side.

    Args:
        modules: the modules. Those that are not plain linear ones compute by themselves.
        forms: forms of the weights on a CPU; None on other devices.
        summed_over: ranks that divide the columns of a single module, and sum their outputs. None:
            this process has all columns.
        packs: whether a GPU copies the weights side by side, for one product.

    Attributes:
        group: `summed_over`.
        weight: the weights in forms, on a CPU; None: not used.
        factors: weight and bias of each product on a GPU. Empty: the modules are called.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        forms: Forms | None,
        summed_over: RolloutGroup | None = None,
        *,
        packs: bool = False,
    ) -> None:
        self.modules = modules
        self.group = summed_over
        self.weight: Weight | None = None
        self.factors: list[tuple[Tensor, Tensor | None]] = []
        linears = [module for module in modules if type(module) is nn.Linear]
        # With a module of another kind, such as one with an adapter, all modules are called.
        if len(linears) < len(modules):
            return
        weights = [module.weight.detach() for module in linears]
        biases = [module.bias.detach() for module in linears if module.bias is not None]
        # A single product needs a bias for each of the weights, or no bias at all.
        is_uniform = len(biases) in (0, len(linears))
        if forms is not None and is_uniform:
            # In a sum over ranks, only the leader adds the bias.
            has_bias = bool(biases) and (self.group is None or self.group.is_leader)
            is_sum = self.group is not None
            self.weight = forms.make(weights, biases if has_bias else None, is_sum=is_sum)
        elif forms is None and len(linears) > 1:
            # On a GPU: either one product of all weights, or a product for each weight.
            if packs and is_uniform:
                self.factors = [(torch.cat(weights), torch.cat(biases) if biases else None)]
                return
            for weight, module in zip(weights, linears, strict=True):
                bias = None if module.bias is None else module.bias.detach()
                self.factors.append((weight, bias))

    def __call__(self, states: Tensor) -> Tensor:
        """Compute the outputs of all modules, side by side: [B, N, D] -> [B, N, O]."""
        # On a CPU with forms.
        if self.weight is not None:
            product = self.weight.multiply(states)
            if self.group is not None:
                # Sum in float32, and round once.
                product = self.group.all_reduce(product.float())
            return product.to(states.dtype)
        # Without forms, as on a GPU, ranks sum in the dtype of the model: in half precision only
        # half as many bytes travel between them.
        if self.group is not None:
            (module,) = cast(Any, self.modules)
            bias = module.bias if self.group.is_leader else None
            return self.group.all_reduce(linear(states, module.weight, bias))
        # The weights were copied side by side.
        if len(self.factors) == 1:
            weight, bias = self.factors[0]
            return linear(states, weight, bias)
        # There is a single module, or a module of another kind.
        if not self.factors:
            outputs = [module(states) for module in self.modules]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

        # There are several weights without a copy: each product writes its columns of the result.
        rows = states.flatten(0, -2).detach()
        widths = [len(weight) for weight, _ in self.factors]
        result = rows.new_empty(len(rows), sum(widths))
        for (weight, bias), columns in zip(self.factors, result.split(widths, 1), strict=True):
            if bias is None:
                torch.mm(rows, weight.mT, out=columns)
            else:
                torch.addmm(bias, rows, weight.mT, out=columns)
        return result.unflatten(0, states.shape[:-1])


def description_of(model: PreTrainedModel) -> str:
    """Describe how a model is computed, and the copies of the weights that this needs."""
    forms = _forms_for(model)
    text = "layer by layer" if is_plain(model) else "by the model's own module"
    mixture_layers = [*mixtures(model)]
    if mixture_layers:
        have_gates = all(getattr(layer.experts, "has_gate", False) for layer in mixture_layers)
        if have_gates and forms is not None and forms.many is not None:
            text += ", experts in a loop over those that tokens chose"
        else:
            text += ", experts by the model's own module"
    if forms is None:
        return text
    return f"{text}{forms.description}; {about_kernels()}"


def _forms_for(model: PreTrainedModel) -> Forms | None:
    """The forms for a model's weights on this CPU; None on another device."""
    weight = cast(Any, head_of(model)).weight
    if weight.device.type != "cpu":
        return None
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return Forms(weight.dtype, num_weights)


def is_plain(model: PreTrainedModel) -> bool:
    """Whether `PlainNetwork` can compute a model.

    It can if the layers are norms, attention (perhaps in a window), and MLPs gated by SiLU or
    mixtures of such MLPs, and if rotary positions turn whole heads.
    """
    config = model.config.get_text_config()
    if type(model).__name__ not in PLAIN or getattr(config, "hidden_act", None) != "silu":
        return False
    return getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)


def state_of(model: nn.Module) -> State:
    """Identify the parameters of a model and their values, without reading the values.

    Returns:
        Address of each parameter, and torch's count of in-place writes to it. Two states are equal
        if the parameters have not changed.
    """
    state = []
    for parameter in model.parameters():
        # torch does not count writes to tensors that were made in inference mode.
        version = 0 if parameter.is_inference() else parameter._version
        state.append((parameter.data_ptr(), version))
    return tuple(state)


def shard_boxes(model: PreTrainedModel, group: RolloutGroup) -> dict[str, Box]:
    """Compute the part of each parameter that a rank of a group holds (tensor parallelism).

    A rank has the rows of some heads and the same columns of `o_proj`, some of the MLP's rows and
    the same columns of `down_proj`, and the rows of some tokens (arXiv:1909.08053). If there are
    fewer key-value heads than ranks, several ranks have the same one. Norms and `o_proj.bias` are
    whole on every rank.

    Args:
        model: a plain decoder; it may be on "meta".
        group: the rank's group.

    Returns:
        The box of each shard, by name.
    """
    config = model.config.get_text_config()
    rank = group.rank
    num_ranks = group.size
    num_key_heads = config.num_key_value_heads
    head_size = model.base_model.layers[0].self_attn.head_dim

    # Pairs of start and size of the rank's part.
    num_query_rows = config.num_attention_heads // num_ranks * head_size
    query = (rank * num_query_rows, num_query_rows)
    # With fewer key-value heads than ranks, neighbouring ranks have the same head.
    first_key_head = rank * num_key_heads // num_ranks
    key = (first_key_head * head_size, max(1, num_key_heads // num_ranks) * head_size)
    width = part_of(config.intermediate_size, num_ranks, rank)
    vocabulary = part_of(config.vocab_size, num_ranks, rank)
    rows = {
        "q_proj": query,
        "k_proj": key,
        "v_proj": key,
        "gate_proj": width,
        "up_proj": width,
        "embed_tokens": vocabulary,
        "lm_head": vocabulary,
    }
    columns = {"o_proj": query, "down_proj": width}

    # A parameter in neither table is whole, and so is a bias of `o_proj` or `down_proj`.
    boxes = {}
    for name, parameter in model.named_parameters():
        # Such as "q_proj" and "weight".
        *_, module, kind = name.split(".")
        start = [0] * parameter.dim()
        shape = list(parameter.shape)
        if module in rows:
            start[0], shape[0] = rows[module]
        elif module in columns and kind == "weight":
            start[1], shape[1] = columns[module]
        boxes[name] = Box(tuple(start), tuple(shape))
    return boxes
