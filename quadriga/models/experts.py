# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts: recording, replay and statistics of their choices.

    rollout       `RouteRecorder` records the routers' choices.
    training      `Routing` of a packed batch says which choices to replay and what to record. Each
                  layer gets it as an argument, also when activation checkpointing computes the
                  layer again.

A mixture is a module with a router and the experts of one layer.

Legend: E experts of a layer, F width of each, D hidden size, k experts per token, L mixtures of a
model, N packed tokens, n of them on this rank, m of these that predict a response token, b rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quadriga.errors import EngineError

ROUTES = "routed_experts"
"""Batch field [B, P + T, L, k]: the experts that a token goes through; -1 where unknown."""
_NUM_SUMS = 6  # columns of `Routing.sums` behind the columns of the experts


def mixtures(model: nn.Module) -> Iterator[Any]:
    """Mixtures of experts of a model, in the order of its layers."""
    return (module for module in model.modules() if is_mixture(module))


def is_mixture(module: nn.Module) -> bool:
    """Whether a module has a router and experts whose matrices are one parameter.

    The parameter is [E, D, F] or [E, F, D].
    """
    down = getattr(getattr(module, "experts", None), "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def router_of(mixture: Any) -> Any:
    """The module of a mixture that chooses `top_k` experts for each token."""
    return mixture.gate if hasattr(mixture, "gate") else mixture.router


def _mixtures_to_route(model: nn.Module) -> dict[str, Any]:
    """Find the mixtures whose routers can be recorded and replayed, by name of the mixture.

    Only routers with the attributes `num_experts` and `top_k` can.
    """
    mixtures_by_name = {}
    for name, module in model.named_modules():
        if is_mixture(module) and {"num_experts", "top_k"} <= vars(router_of(module)).keys():
            mixtures_by_name[name] = module
    return mixtures_by_name


def dtype_of_routes(num_experts: int) -> torch.dtype:
    """The narrowest integer dtype that holds an expert's index and -1."""
    return torch.int8 if num_experts <= torch.iinfo(torch.int8).max else torch.int16


class RouteRecorder:
    """Records the choices of a model's routers while `is_on`."""

    def __init__(self, model: nn.Module) -> None:
        self.is_on = False
        self._chosen: list[Tensor] = []
        for mixture in _mixtures_to_route(model).values():
            router_of(mixture).register_forward_hook(self._record)

    def _record(self, router: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        """Hook of a router: record the indices of the experts, its third output."""
        if self.is_on:
            chosen = output[2].detach()
            self._chosen.append(chosen.to(dtype_of_routes(router.num_experts)))

    def take(self) -> Tensor:
        """Return and forget the choices [n, L, k] for the last call's tokens, on the CPU."""
        chosen = self._chosen
        self._chosen = []
        return torch.stack(chosen, 1).cpu()


@dataclass(eq=False)
class Routing:
    """Routing of a packed batch's tokens through the experts, and what is recorded of it.

    Attributes:
        replayed: experts [N, L, k] to go through. Where it is -1, the router chooses. None: the
            routers choose for all tokens.
        loss_weight: weight in the loss of a predicted token's load-balancing loss.
        z_weight: weight in the loss of a predicted token's z-loss in one layer.
        records_choice: whether to record `chosen`.
        chosen: experts [N, L, k] of the last call.
        sums: [L, E + 6] float64, to which each call adds sums over its predicted tokens: the number
            of tokens of each expert; then the number of tokens, entropies, load-balancing losses,
            z-losses, the number of tokens with replayed experts, and the number of replayed tokens
            for which the router would have chosen other experts. None: nothing is summed.
    """

    replayed: Tensor | None = None
    loss_weight: float = 0.0
    z_weight: float = 0.0
    records_choice: bool = False
    chosen: Tensor | None = None
    sums: Tensor | None = None


@dataclass(eq=False)
class RoutedTokens:
    """Tokens [n] of this rank in one call of the model, as the hooks of `Routers` see them.

    Attributes:
        routing: the batch's `Routing`.
        start: packed index of the first token.
        predictors: [m] indices, among the n tokens, of those that predict a response token.
        rows: [m] row of each predicted token.
        lengths: [b] number of predicted tokens of each row, over all ranks.
        add_up: sums a tensor in place over the ranks with other tokens of the same rows.
        chosen: experts [n, k] by index of the mixture.
        is_replayed: [n] whether each token replays its experts in the current mixture.
    """

    routing: Routing
    start: int
    predictors: Tensor
    rows: Tensor
    lengths: Tensor
    add_up: Callable[[Tensor], Any]
    chosen: dict[int, Tensor] = field(default_factory=dict)
    is_replayed: Tensor | None = None

    def experts_to_replay(self, mixture: int, num_tokens: int) -> Tensor | None:
        """Find the experts to replay in a mixture, and set `is_replayed` for `record_choice`.

        Args:
            mixture: index of the mixture.
            num_tokens: n.

        Returns:
            [n, k], or None if nothing is replayed. -1 leaves the choice to the router, as for all
            tokens that only pad the batch.
        """
        if self.routing.replayed is None:
            return None
        routes = self.routing.replayed[self.start : self.start + num_tokens, mixture].long()
        num_padded = num_tokens - len(routes)
        # The batch may have been padded after its routes were packed; see `PackedBatch.pad_to`.
        routes = nn.functional.pad(routes, (0, 0, 0, num_padded), value=-1)
        self.is_replayed = routes[:, 0] >= 0
        return routes

    def record_choice(
        self,
        mixture: int,
        logits: Tensor,
        scores: Tensor,
        chosen: Tensor,
        own_choice: Tensor | None,
    ) -> Tensor:
        """Record a router's choice, and attach router losses to the scores.

        Args:
            mixture: index of the mixture.
            logits: [n, E] logits of the router.
            scores: [n, k] weights of the chosen experts.
            chosen: [n, k] experts that the tokens go through.
            own_choice: [n, k] experts that the router would have chosen; None without replay.

        Returns:
            The scores. Their backward pass also computes the gradients of the load-balancing loss
            and the z-loss.
        """
        routing = self.routing
        # Activation checkpointing computes a layer twice, but its tokens count once.
        is_first = mixture not in self.chosen
        self.chosen[mixture] = chosen.detach()
        if routing.sums is None:
            return scores
        predicted_logits = logits.float()[self.predictors]  # [m, E]
        chosen_experts = chosen[self.predictors]  # [m, k]
        log_probs = predicted_logits.log_softmax(-1)
        balance_loss = predicted_logits.new_zeros(())
        z_loss = predicted_logits.new_zeros(())
        if routing.loss_weight and torch.is_grad_enabled():
            balance_loss = self._balance_loss(log_probs.exp(), chosen_experts)
            # The loss is a sum over tokens. `loss_weight` also normalises it.
            scores = _WithLoss.apply(scores, balance_loss * routing.loss_weight)
        if routing.z_weight and torch.is_grad_enabled():
            z_loss = predicted_logits.logsumexp(-1).square().sum()
            scores = _WithLoss.apply(scores, z_loss * routing.z_weight)
        if is_first:
            with torch.no_grad():
                self._add_to_sums(
                    routing.sums[mixture],
                    log_probs,
                    chosen_experts,
                    own_choice,
                    [balance_loss, z_loss],
                )
        return scores

    def _add_to_sums(
        self,
        sums: Tensor,
        log_probs: Tensor,
        chosen_experts: Tensor,
        own_choice: Tensor | None,
        losses: list[Tensor],
    ) -> None:
        """Add the predicted tokens to the sums of a mixture.

        Args:
            sums: [E + 6], changed in place; see `Routing.sums`.
            log_probs: [m, E], of the router.
            chosen_experts: [m, k] experts that the tokens go through.
            own_choice: [n, k] experts that the router would have chosen; None without replay.
            losses: load-balancing loss and z-loss, [] each.
        """
        num_experts = log_probs.shape[1]
        zero = sums.new_zeros(())
        num_replayed = zero
        num_differing = zero
        if own_choice is not None:
            # Compare as sets, because the order of a token's experts does not matter.
            own_sorted = own_choice[self.predictors].sort(-1).values
            differs = (own_sorted != chosen_experts.sort(-1).values).any(-1)
            is_replayed = self.is_replayed[self.predictors]
            num_replayed = is_replayed.sum()
            num_differing = (differs & is_replayed).sum()
        entropy = -(log_probs.exp() * log_probs).sum()

        # In the order of `Routing.sums`. The number of tokens becomes a tensor, like other totals.
        sums[:num_experts].index_add_(
            0, chosen_experts.flatten(), sums.new_ones(chosen_experts.numel())
        )
        totals = (zero + len(chosen_experts), entropy, *losses, num_replayed, num_differing)
        sums[num_experts:] += torch.stack([total.double() for total in totals])

    def _balance_loss(self, probs: Tensor, chosen_experts: Tensor) -> Tensor:
        """Load-balancing loss [], summed over tokens: E * sum_e f_e p_e.

        f_e is the share of expert e in the choices of the token's row, p_e its probability.
        """
        num_experts = probs.shape[1]
        # Choices of each expert by the tokens of each row, over all ranks.
        counts = probs.new_zeros(len(self.lengths), num_experts)  # [b, E]
        # Index of row r and expert e in the flattened counts: r * E + e.
        indices = (self.rows[:, None] * num_experts + chosen_experts).flatten()
        counts.view(-1).index_add_(0, indices, probs.new_ones(indices.shape))
        self.add_up(counts)
        num_choices = self.lengths * chosen_experts.shape[1]  # [b]
        shares = counts / num_choices.clamp(min=1)[:, None]
        return num_experts * (shares[self.rows] * probs).sum()


class Routers:
    """The routers of a model in training, which replay choices and collect statistics.

    Args:
        model: the full model; hooks are added to its layers and routers. Routers are numbered in
            the order of the layers, and keep their numbers when a pipeline stage drops layers.

    Attributes:
        num_experts: E, or 0 without experts.
        top_k: k, or 0 without experts.
        count: L, or 0 without experts.
        is_checked: whether replayed routes have been compared with the routers' own choices.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_experts = 0
        self.top_k = 0
        self.count = 0
        self.is_checked = False
        for name, mixture in _mixtures_to_route(model).items():
            # Only the layer is called with `RoutedTokens` as an argument. A hook of the layer
            # stores them for the call of its router.
            router = router_of(mixture)
            layer = model.get_submodule(name.rpartition(".")[0])
            hooks = _RouterHooks(router, self.count)
            layer.register_forward_pre_hook(hooks.store_tokens, with_kwargs=True)
            layer.register_forward_hook(hooks.clear_tokens, always_call=True)
            router.forward = partial(hooks, router.forward)
            self.num_experts = router.num_experts
            self.top_k = router.top_k
            self.count += 1

    def new_sums(self, device: torch.device) -> Tensor:
        """Zeros [L, E + 6] for `Routing.sums`."""
        num_columns = self.num_experts + _NUM_SUMS
        return torch.zeros(self.count, num_columns, dtype=torch.float64, device=device)

    def require_compatible(self, routes: Tensor) -> None:
        """Check that routes [B, P + T, L, k] fit this model.

        Raises:
            EngineError: they are routes of another model.
        """
        shape = tuple(routes.shape[2:])
        if shape != (self.count, self.top_k):
            got = f"routes of {' x '.join(map(str, shape))} for each token"
            expected = f"{self.count} layers with {self.top_k} experts each"
        elif routes.numel() and int(routes.max()) >= self.num_experts:
            got = f"expert {int(routes.max())} in a route"
            expected = f"one of {self.num_experts}, counted from 0"
        else:
            return
        raise EngineError(
            "router_replay",
            got=got,
            expected=expected,
            fix="Set router_replay=off, or generate with this model by an engine that reports a "
            "token's experts in each layer.",
        )


@dataclass(eq=False)
class _RouterHooks:
    """Forward pass of one router, and hooks of its layer that tell the router about the tokens."""

    router: Any
    number: int  # of the router in the model
    tokens: RoutedTokens | None = None  # tokens of the layer's current call

    def store_tokens(self, layer: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        """Hook before the layer: store the tokens of its call."""
        self.tokens = options.get("routed_tokens")

    def clear_tokens(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Hook after the layer: forget the tokens of its call."""
        self.tokens = None

    def __call__(self, forward: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """Forward pass of the router, with replay and statistics.

        Args:
            forward: the router's own forward pass.
            hidden: hidden states of the tokens, [..., D].
            args: further arguments of the router.

        Returns:
            The output of the router.

        Raises:
            EngineError: the router does not report its choice, or does not choose by `topk`.
        """
        tokens = self.tokens
        # Without a `Routing`, as in a check of the model, nothing is recorded or replayed.
        if tokens is None:
            return forward(hidden, *args)
        routes = tokens.experts_to_replay(self.number, hidden.numel() // hidden.shape[-1])
        own_choice = None
        if routes is None:
            output = forward(hidden, *args)
        else:
            with _ReplayedTopK(routes, self.router.num_experts) as replay:
                output = forward(hidden, *args)
            own_choice = replay.own_choice
        # Most routers of transformers return logits, weights and indices of the experts.
        reports_choice = isinstance(output, tuple) and len(output) == 3
        if reports_choice and (routes is None or own_choice is not None):
            logits, scores, chosen = output
            scores = tokens.record_choice(self.number, logits, scores, chosen, own_choice)
            return logits, scores, chosen

        # The choice is unknown. That is no error if nothing depends on it.
        routing = tokens.routing
        needs_choice = routing.records_choice or routing.loss_weight or routing.z_weight
        if routes is None and not needs_choice:
            return output
        raise EngineError(
            "router_replay",
            got=type(self.router).__name__,
            expected="a router that chooses experts by torch.topk, and says which",
            fix="Set router_replay=off, router_aux_loss_coef=0 and router_z_loss_coef=0.",
        )


class _ReplayedTopK(TorchFunctionMode):
    """Context manager: a router's `topk` returns recorded experts instead of the highest scores.

    Args:
        routes: experts to return, [n, k]; -1 leaves the choice to `topk`.
        num_experts: E.

    Attributes:
        own_choice: experts with the highest scores, [n, k]; None before the router calls `topk`.
    """

    def __init__(self, routes: Tensor, num_experts: int) -> None:
        super().__init__()
        self.routes = routes
        self.num_experts = num_experts
        self.own_choice: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace the result of `topk` on scores [n, E]. Other calls of torch are unchanged."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        # A router may also use `topk` to choose groups of experts, with scores of another shape.
        if scores.shape != (len(self.routes), self.num_experts):
            return result
        self.own_choice = result.indices
        # Gather the values from `scores`, so that gradients flow to the replayed experts' scores.
        chosen = torch.where(self.routes >= 0, self.routes, self.own_choice)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class _WithLoss(torch.autograd.Function):
    """Return `values` unchanged. In the backward pass, the scalar `loss` gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)
