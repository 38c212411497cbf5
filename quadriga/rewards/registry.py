# SPDX-License-Identifier: Apache-2.0
"""Reward managers: what each takes and gives, their names, and the one that a configuration names.

A built-in manager is a class in a file of `managers/`, and a name in `BUILT_IN`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from quadriga.errors import RewardError
from quadriga.rewards.outcome import Outcome
from quadriga.user_file import is_reference, referred

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quadriga.config import Config
    from quadriga.observe.metrics import Metric
    from quadriga.protocol import DataProto

ManagerClass = TypeVar("ManagerClass", bound=type)
BUILT_IN = {name: f"quadriga.rewards.managers.{name}" for name in ("naive", "judge")}
BUILT_IN |= dict.fromkeys(("batch", "prime", "dapo", "in_process"), BUILT_IN["naive"])
"""Name -> module."""
_classes: dict[str, type] = {}


@dataclass
class RewardOutput:
    """The rewards of a batch of `B` responses of up to `T` tokens."""

    scores: "torch.Tensor"  # [B, T] float32, zero but for the last valid token of each response, where its score stands
    # Object arrays [B]: "reward_error" (why there is no score, else ""), and what the score function returned in
    # addition to the score, None where a sample has no such entry.
    extra: "dict[str, np.ndarray]" = field(default_factory=dict)
    # "reward/errors", "reward/timeouts", "reward/ungradable", "reward/error_rate", and "reward/extra/NAME", the mean of
    # each numeric entry.
    metrics: "dict[str, Metric]" = field(default_factory=dict)


@dataclass(frozen=True)
class Grading:
    """Rewards that are being computed while their caller does something else: `result` waits for them and raises a
    grader's error; when `cancel` returns, no process of the manager grades them."""

    result: Callable[[], RewardOutput]
    cancel: Callable[[], object]


class RewardManager:
    """Turns responses into rewards. A subclass is registered by name; it has `begin`, or `__call__` alone.

    The loop calls `begin` once the responses are there, and joins the `Grading` where it reads the rewards. With
    `rollout.mode=async` each response is given to `grade_one` as soon as it is written, and `begin` gets the outcomes.
    """

    grades_early: bool = False  # whether there is a `grade_one`
    notices: Sequence[str] = ()  # sentences that the start of a run prints

    def __call__(self, data: "DataProto") -> RewardOutput:
        """Grade the responses of a batch, and wait for their rewards; see `begin`."""
        return self.begin(data).result()

    def begin(self, data: "DataProto", outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        """Begin to grade the responses of a batch; a manager that is only called grades them at the join.
        Raises RewardError: a column or a ground truth is missing; or, where the rewards are joined, more than
        `reward_model.max_error_rate` of the samples could not be graded.
        `data`: tensors `responses` [B, T] and `attention_mask` [B, P+T]; the data source's column, `reward_model` with
        a "ground_truth" each, and `extra_info` (optional). Others may be added until the join.
        `outcomes`: [B] those of `grade_one`, None for a response that is not graded yet."""
        return Grading(partial(self, data), lambda: None)

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """Grade one response, given as `data_source`, `solution_str`, `ground_truth` and `extra_info`. What is wrong
        with it or its grader is part of the outcome; RewardError: none of this data source can be graded."""
        raise NotImplementedError(f"{type(self).__name__} grades batches only")

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        """Refuse a row whose responses could not be graded, before there are any: RewardError.
        `rows`: of each row its place (file and number), its data source, and its `reward_model`."""

    def close(self) -> None:
        """Free what the manager holds, above all its processes."""


def register(name: str) -> Callable[[ManagerClass], ManagerClass]:
    """Class decorator: make a reward manager known as `reward_model.reward_manager=NAME`."""

    def add(cls: ManagerClass) -> ManagerClass:
        taken, home = _classes.get(name, cls), BUILT_IN.get(name, cls.__module__)
        # A file that is loaded again makes its classes anew.
        if (taken.__module__, taken.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ) or home != cls.__module__:
            owner = home if taken is cls else f"{taken.__module__}.{taken.__qualname__}"
            raise RewardError(
                f"register({name!r})",
                got=cls.__qualname__,
                expected=f"a free name, it is {owner}'s",
            )
        _classes[name] = cls
        return cls

    return add


def get_reward_manager_cls(name: str) -> type:
    """The reward manager that is registered as `name`, or that `path/to/file.py:Class` names.
    Raises RewardError: there is none. ConfigError: the file cannot be imported, or lacks the class."""
    if is_reference(name):
        return referred(name, "reward_model.reward_manager", base=object)
    if name not in _classes and name in BUILT_IN:
        import_module(BUILT_IN[name])
    if name not in _classes:
        expected, file = (
            f"one of {', '.join(sorted({*_classes, *BUILT_IN}))}",
            "actor_rollout_ref.model.external_lib",
        )
        fix = f"Your own class: file.py:Class, or @quadriga.rewards.register(name) in a file of {file}."
        raise RewardError("reward_model.reward_manager", got=name, expected=expected, fix=fix)
    return _classes[name]


class _Called(RewardManager):
    """A user's manager that has `__call__` and `close`, and is no `RewardManager`."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.close = manager, manager.close

    def __call__(self, data: "DataProto") -> RewardOutput:
        return self.manager(data)


def load_reward_manager(config: "Config", tokenizer: Any) -> RewardManager:
    """The manager that `reward_model.reward_manager` names, ready to grade; the caller closes it."""
    cls = get_reward_manager_cls(config.reward_model.reward_manager)
    if next(iter(signature(cls).parameters), "") == "tokenizer":
        where, got = f"reward manager {cls.__qualname__}", f"{cls.__name__}{signature(cls)}"
        fix = "Change its parameters; one by verl's contract runs with QUADRIGA_VERL=1."
        raise RewardError(where, got=got, expected=f"{cls.__name__}(config, tokenizer)", fix=fix)
    manager = cls(config, tokenizer)
    return manager if isinstance(manager, RewardManager) else _Called(manager)


def early_grader(config: "Config", tokenizer: Any, num_processes: int = 1) -> RewardManager | None:
    """A manager to grade single responses in the rollout's process; the caller closes it. The `num_processes` that
    generate share `reward_model.num_workers`, at least one each. None where all responses are graded together
    afterwards: with `rollout.mode=sync`, with a manager that grades batches only or is registered on the driver alone,
    and where a reward model alone grades."""
    settings = config.reward_model
    is_model_alone = settings.enable and config.custom_reward_function.path is None
    is_known = is_reference(settings.reward_manager) or settings.reward_manager in {
        *_classes,
        *BUILT_IN,
    }
    if config.actor_rollout_ref.rollout.mode == "sync" or is_model_alone or not is_known:
        return None
    if not getattr(get_reward_manager_cls(settings.reward_manager), "grades_early", False):
        return None
    share = settings.model_copy(
        update={"num_workers": max(1, settings.num_workers // num_processes)}
    )
    return load_reward_manager(config.model_copy(update={"reward_model": share}), tokenizer)
