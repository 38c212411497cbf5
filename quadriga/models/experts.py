# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as transformers builds them: a router and the experts of a layer, side by side in one module;
what routers choose, and how they are told.

    rollout       `RouteRecorder` hears what the routers choose
    training      `Routing` of a packed batch says which choices are repeated and what is kept; it travels with the call
                  to each layer, in the recomputation of activation checkpointing too

Legend: E experts of a layer, F width of each, D hidden size, k experts for each token, L mixtures of a model, N packed
tokens, n of them on this rank, m of these that a response's token is predicted from, b rows.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quadriga.errors import EngineError

ROUTES = "routed_experts"
"""Column [B, P + T, L, k]: the experts that a token goes through; -1 where nothing is known of it."""
_NUM_SUMS = 6


def mixtures(model: nn.Module) -> Iterator[Any]:
    """The mixtures of experts of a model, in the order of its layers."""
    return (module for module in model.modules() if is_mixture(module))


def is_mixture(module: nn.Module) -> bool:
    """Whether a module is a router with its experts, whose matrices are one parameter: [E, D, F], or [E, F, D]."""
    down = getattr(getattr(module, "experts", None), "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def router_of(mixture: Any) -> Any:
    """The module that chooses `top_k` of the experts for each token."""
    return mixture.gate if hasattr(mixture, "gate") else mixture.router


def _told_mixtures(model: nn.Module) -> dict[str, Any]:
    found = {name: one for name, one in model.named_modules() if is_mixture(one)}
    return {
        name: one
        for name, one in found.items()
        if {"num_experts", "top_k"} <= vars(router_of(one)).keys()
    }


def dtype_of_routes(num_experts: int) -> torch.dtype:
    """The narrowest integers that hold the number of an expert, and -1."""
    return torch.int8 if num_experts <= torch.iinfo(torch.int8).max else torch.int16


class RouteRecorder:
    """What the routers of a model choose for the tokens of each call, while it is on."""

    def __init__(self, model: nn.Module) -> None:
        self.is_on = False
        self._chosen: list[Tensor] = []
        for mixture in _told_mixtures(model).values():
            router_of(mixture).register_forward_hook(self._hear)

    def _hear(self, router: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self.is_on:
            self._chosen.append(output[2].detach().to(dtype_of_routes(router.num_experts)))

    def take(self) -> Tensor:
        """[n, L, k] of the tokens of the last call, on the CPU."""
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, 1).cpu()


@dataclass(eq=False)
class Routing:
    """How the tokens of a packed batch go through the routers."""

    told: Tensor | None = (
        None  # [N, L, k] experts to go through, -1 (or None for all): the router's own choice
    )
    loss_weight: float = 0.0  # what the load-balancing loss of a predicted token counts in the loss
    z_weight: float = 0.0  # what the z-loss of a predicted token in a layer counts in the loss
    keeps: bool = False  # whether `chosen` is kept
    chosen: Tensor | None = None  # [N, L, k], what the last call went through
    # [L, E + 6] float64 that predicted tokens add to: tokens of each expert; tokens, entropies, load-balancing losses,
    # z-losses, tokens that were told, and those of them where the router's own choice is another.
    sums: Tensor | None = None


@dataclass(eq=False)
class RoutedTokens:
    """The tokens [n] of this rank in one call of the model, as the hooks of `Routers` see them."""

    routing: Routing
    start: int  # the packed index of the first
    places: Tensor  # [m] those that something is predicted from
    rows: Tensor  # [m] of which row
    lengths: Tensor  # [b] tokens that are predicted of each row, by all ranks
    add_up: Callable[[Tensor], Any]  # over the ranks that have other tokens of the same rows
    chosen: dict[int, Tensor] = field(default_factory=dict)  # [n, k] by the number of the mixture
    is_told: Tensor | None = None  # [n] of the mixture that computes

    def told(self, mixture: int, num_tokens: int) -> Tensor | None:
        """[n, k] for a mixture; tokens that fill a batch up choose themselves."""
        if self.routing.told is None:
            return None
        own = self.routing.told[self.start : self.start + num_tokens, mixture].long()
        own = nn.functional.pad(own, (0, 0, 0, num_tokens - len(own)), value=-1)
        self.is_told = own[:, 0] >= 0
        return own

    def see(
        self, mixture: int, logits: Tensor, scores: Tensor, chosen: Tensor, own: Tensor | None
    ) -> Tensor:
        """Count what a router chose, [n, E] and [n, k] three times. Returns the scores, which carry the gradients of
        the load-balancing loss and the z-loss. `own`: what it would have chosen, where it was told."""
        routing, is_first = self.routing, mixture not in self.chosen
        self.chosen[mixture] = chosen.detach()
        if routing.sums is None:
            return scores
        here, picked = logits.float()[self.places], chosen[self.places]
        log_probs, losses = here.log_softmax(-1), [here.new_zeros(()), here.new_zeros(())]
        if routing.loss_weight and torch.is_grad_enabled():
            losses[0] = self._balance(log_probs.exp(), picked)
            scores = _WithLoss.apply(scores, losses[0] * routing.loss_weight)
        if routing.z_weight and torch.is_grad_enabled():
            losses[1] = here.logsumexp(-1).square().sum()
            scores = _WithLoss.apply(scores, losses[1] * routing.z_weight)
        if is_first:
            with torch.no_grad():
                self._count(routing.sums[mixture], log_probs, picked, own, losses)
        return scores

    def _count(
        self,
        sums: Tensor,
        log_probs: Tensor,
        picked: Tensor,
        own: Tensor | None,
        losses: list[Tensor],
    ) -> None:
        """Add the predicted tokens [m, E] and [m, k] to the sums [E + 6] of a mixture."""
        num_experts, zero = log_probs.shape[1], sums.new_zeros(())
        told = differing = zero
        if own is not None:
            differs = (own[self.places].sort(-1).values != picked.sort(-1).values).any(-1)
            is_told = self.is_told[self.places]
            told, differing = is_told.sum(), (differs & is_told).sum()
        entropy = -(log_probs.exp() * log_probs).sum()
        facts = (zero + len(picked), entropy, *losses, told, differing)
        sums[:num_experts].index_add_(0, picked.flatten(), sums.new_ones(picked.numel()))
        sums[num_experts:] += torch.stack([fact.double() for fact in facts])

    def _balance(self, probs: Tensor, picked: Tensor) -> Tensor:
        """Sum [] over tokens of E * sum_e f_e p_e, f_e being the share of its row's choices that expert e got."""
        num_experts = probs.shape[1]
        counts = probs.new_zeros(len(self.lengths), num_experts)
        ones = probs.new_ones(picked.shape)
        counts.view(-1).index_add_(
            0, (self.rows[:, None] * num_experts + picked).flatten(), ones.flatten()
        )
        self.add_up(counts)
        shares = counts / (self.lengths * picked.shape[1]).clamp(min=1)[:, None]
        return num_experts * (shares[self.rows] * probs).sum()


class Routers:
    """The routers of a model that is trained: they go where they are told, and what they choose is counted. They are
    numbered in the order of the whole model's layers, so that a pipeline's stage, which keeps some of them, knows which
    ones it has. Without experts E, k and L are 0."""

    def __init__(self, model: nn.Module) -> None:
        self.num_experts = self.top_k = self.count = 0
        self.is_checked = (
            False  # whether routes from elsewhere have been compared with what these would choose
        )
        for name, mixture in _told_mixtures(model).items():
            router, layer = router_of(mixture), model.get_submodule(name.rpartition(".")[0])
            route = _Route(router, self.count)
            layer.register_forward_pre_hook(route.begin, with_kwargs=True)
            layer.register_forward_hook(route.end, always_call=True)
            router.forward = partial(route, router.forward)
            self.num_experts, self.top_k, self.count = (
                router.num_experts,
                router.top_k,
                self.count + 1,
            )

    def new_sums(self, device: torch.device) -> Tensor:
        """Zeros [L, E + 6] for `Routing.sums`."""
        return torch.zeros(
            self.count, self.num_experts + _NUM_SUMS, dtype=torch.float64, device=device
        )

    def require(self, routes: Tensor) -> None:
        """Refuse routes [B, P + T, L, k] of another model. Raises EngineError: says what they are."""
        shape, expected = tuple(routes.shape[2:]), (self.count, self.top_k)
        fix = "The rollout generates with another model, or its engine reports routes in another form."
        if shape != expected:
            told = f"{self.count} layers with {self.top_k} experts each"
            raise EngineError(
                "router_replay",
                f"routes of {' x '.join(map(str, shape))} for each token",
                told,
                fix,
            )
        if routes.numel() and int(routes.max()) >= self.num_experts:
            got, told = (
                f"expert {int(routes.max())} in a route",
                f"one of {self.num_experts}, counted from 0",
            )
            raise EngineError("router_replay", got=got, expected=told, fix=fix)


class _Route:
    """One router, as its layer begins, computes and ends."""

    def __init__(self, router: Any, number: int) -> None:
        self.router, self.number = router, number
        self.tokens: RoutedTokens | None = None

    def begin(self, layer: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        self.tokens = options.get("routed_tokens")

    def end(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.tokens = None

    def __call__(self, forward: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        if (tokens := self.tokens) is None:
            return forward(hidden, *args)
        told = tokens.told(self.number, hidden.numel() // hidden.shape[-1])
        telling = None if told is None else _Told(told, self.router.num_experts)
        with telling or nullcontext():
            output = forward(hidden, *args)
        own = None if telling is None else telling.own
        if isinstance(output, tuple) and len(output) == 3 and (told is None or own is not None):
            logits, scores, chosen = output
            return logits, tokens.see(self.number, logits, scores, chosen, own), chosen
        routing = tokens.routing
        if told is None and not (routing.keeps or routing.loss_weight or routing.z_weight):
            return output
        got, fix = (
            type(self.router).__name__,
            "Set router_replay=off, router_aux_loss_coef=0 and router_z_loss_coef=0.",
        )
        raise EngineError(
            "router_replay", got, "a router that chooses experts by torch.topk, and says which", fix
        )


class _Told(TorchFunctionMode):
    """While it is entered, the best k of [n, E] are those that were told [n, k], -1 aside; `own` would have been."""

    def __init__(self, told: Tensor, num_experts: int) -> None:
        super().__init__()
        self.told, self.num_experts = told, num_experts
        self.own: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape != (
            len(self.told),
            self.num_experts,
        ):
            return found
        self.own = found.indices
        chosen = torch.where(self.told >= 0, self.told, self.own)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class _WithLoss(torch.autograd.Function):
    """Passes values on, and gives a loss [] beside them the gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)
