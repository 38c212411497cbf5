# SPDX-License-Identifier: Apache-2.0
"""The interface of reward managers, their registry, and loading the manager of a configuration.

A built-in manager is a class in a file of `managers/` and a name in `BUILT_IN`.

Shapes: B responses, P prompt positions, T response positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from quadriga.errors import RewardError
from quadriga.rewards.outcome import Outcome
from quadriga.user_file import OTHER_CONTRACT, is_reference, load_reference

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quadriga.config import Config
    from quadriga.observe.metrics import Metric
    from quadriga.protocol import DataProto

ManagerClass = TypeVar("ManagerClass", bound=type)
BUILT_IN = {name: f"quadriga.rewards.managers.{name}" for name in ("naive", "judge")}
BUILT_IN |= dict.fromkeys(("batch", "prime", "dapo", "in_process"), BUILT_IN["naive"])
"""Name of a built-in manager -> its module."""
# Registered managers by name. Built-in ones are registered when their module is imported.
_classes: dict[str, type] = {}


@dataclass
class RewardOutput:
    """The rewards of a batch of responses."""

    # [B, T] float32. The last valid token of each response has the score; all others have 0.
    scores: "torch.Tensor"
    # Object arrays [B]: "reward_error" (why there is no score, else ""), and each entry that the
    # score function returned in addition to the score, None where a sample has no such entry.
    extra: "dict[str, np.ndarray]" = field(default_factory=dict)
    # "reward/errors", "reward/timeouts", "reward/ungradable", "reward/error_rate", and
    # "reward/extra/NAME", the mean of each numeric entry.
    metrics: "dict[str, Metric]" = field(default_factory=dict)
    # [B] seconds since 1970 at which each response was graded, NaN if not known. Empty: not known
    # for any response.
    graded_at: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Grading:
    """Handle of rewards that are computed in the background.

    Attributes:
        result: waits for the rewards; raises a RewardError if too many samples have no grade.
        cancel: stops the computation. When it returns, no process of the manager works on it.
    """

    result: Callable[[], RewardOutput]
    cancel: Callable[[], object]


class RewardManager:
    """Base class of reward managers, which turn responses into rewards.

    A subclass is registered by name and implements `begin`, or `__call__` alone. The training loop
    calls `begin` once the responses are complete, and `result` of the returned `Grading` when it
    needs the rewards. With `rollout.mode=async`, a manager that `grades_early` gets each response
    as soon as it is complete (`grade_one`), and `begin` then gets these outcomes.

    Attributes:
        grades_early: whether `grade_one` is implemented.
        notices: sentences that are printed when a run starts.
        reads_rows: whether `extra_info` needs the entry "row" with all columns of the data row.
    """

    grades_early: bool = False
    notices: Sequence[str] = ()
    reads_rows: bool = False

    def __call__(self, data: "DataProto") -> RewardOutput:
        """Grade the responses of a batch, as for `begin`, and wait for their rewards."""
        return self.begin(data).result()

    def begin(self, data: "DataProto", outcomes: Sequence[Outcome | None] | None = None) -> Grading:
        """Begin to grade the responses of a batch.

        By default, for managers that implement `__call__` alone, the responses are graded only when
        `result` is called, and `outcomes` are not used.

        Args:
            data: tensors `responses` [B, T] and `attention_mask` [B, P+T]; columns: the data
                source, `reward_model` with a "ground_truth" each, and optionally `extra_info`.
                Further fields may be added until the result is taken.
            outcomes: [B] what `grade_one` returned for each response; None for a response that is
                not graded yet. None: no response is.

        Returns:
            The handle, to wait for the rewards or to cancel the grading.

        Raises:
            RewardError: a column or a ground truth is missing. `result` raises it if more than
                `reward_model.max_error_rate` of the samples could not be graded.
        """
        return Grading(partial(self, data), lambda: None)

    async def grade_one(self, row: dict[str, Any]) -> Outcome:
        """Grade one response.

        Args:
            row: facts of the response, as an entry of `Samples.rows`.

        Returns:
            The outcome. An error of the grader is part of it.

        Raises:
            RewardError: no response of this data source can be graded.
        """
        raise NotImplementedError(f"{type(self).__name__} grades batches only")

    def check_rows(self, rows: Sequence[tuple[str, Any, Any]]) -> None:
        """Raise an error at the start of a run if responses to a row of the data cannot be graded.

        By default nothing is checked.

        Args:
            rows: for each row, its file and number, its data source, and its `reward_model`.

        Raises:
            RewardError: responses to a row cannot be graded.
        """

    def close(self) -> None:
        """Release the manager's resources, such as its processes."""


def register(name: str, *, is_built_in: bool = False) -> Callable[[ManagerClass], ManagerClass]:
    """Class decorator that makes a manager available as `reward_model.reward_manager=NAME`.

    Args:
        name: the name of the manager.
        is_built_in: whether the name is one of `BUILT_IN`, which no other class may have.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        RewardError: another class has the name. Raised by the decorator.
    """

    def add(cls: ManagerClass) -> ManagerClass:
        registered = _classes.get(name, cls)
        # Compared by name, because loading a file again makes another class of the same full name.
        is_same = _full_name(registered) == _full_name(cls)
        is_reserved = name in BUILT_IN and not is_built_in
        if not is_same or is_reserved:
            # A built-in manager may not be registered yet. Then its module is named.
            owner = BUILT_IN[name] if registered is cls else _full_name(registered)
            raise RewardError(
                f"register({name!r})",
                got=cls.__qualname__,
                expected=f"another name, since this one belongs to {owner}",
            )
        _classes[name] = cls
        return cls

    return add


def _full_name(cls: type) -> str:
    """Module and qualified name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def get_reward_manager_cls(name: str) -> type:
    """Look up a reward manager by its registered name or by `path/to/file.py:Class`.

    Args:
        name: value of `reward_model.reward_manager`.

    Returns:
        The class.

    Raises:
        RewardError: no manager has that name.
        ConfigError: the file cannot be imported or does not contain the class.
    """
    if is_reference(name):
        return load_reference(name, "reward_model.reward_manager", base=object)
    if name not in _classes and name in BUILT_IN:
        import_module(BUILT_IN[name])
    if name not in _classes:
        raise RewardError(
            "reward_model.reward_manager",
            got=name,
            expected=f"one of {', '.join(sorted({*_classes, *BUILT_IN}))}",
            fix="For a class of your own write file.py:Class, or put "
            "@quadriga.rewards.register(name) before it in a file of "
            "actor_rollout_ref.model.external_lib.",
        )
    return _classes[name]


class _CallableManager(RewardManager):
    """Adapts a user's manager that has `__call__` and `close` but is no `RewardManager`."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.close = manager.close

    def __call__(self, data: "DataProto") -> RewardOutput:
        return self.manager(data)


def load_reward_manager(config: "Config", tokenizer: Any) -> RewardManager:
    """Create the manager that `reward_model.reward_manager` names.

    Args:
        config: the whole configuration.
        tokenizer: tokenizer of the policy, which decodes the responses.

    Returns:
        The manager, ready to grade. The caller closes it.

    Raises:
        RewardError: no manager has that name, or its class takes other arguments.
        ConfigError: the manager's file cannot be imported, or its options are wrong.
    """
    cls = get_reward_manager_cls(config.reward_model.reward_manager)
    # Classes with another contract take the tokenizer first, and cannot be used as they are.
    if next(iter(signature(cls).parameters), "") == "tokenizer":
        raise RewardError(
            f"reward manager {cls.__qualname__}",
            got=f"{cls.__name__}{signature(cls)}",
            expected=f"{cls.__name__}(config, tokenizer)",
            fix=f"Change its parameters. {OTHER_CONTRACT}",
        )
    manager = cls(config, tokenizer)
    return manager if isinstance(manager, RewardManager) else _CallableManager(manager)


def early_grader(config: "Config", tokenizer: Any, num_processes: int = 1) -> RewardManager | None:
    """Create a manager that grades each response in a rollout process as soon as it is complete.

    Args:
        config: the whole configuration.
        tokenizer: tokenizer of the policy.
        num_processes: number of rollout processes; they share `reward_model.num_workers`, with at
            least one worker each.

    Returns:
        The manager, which the caller closes. None if responses are only graded as a batch: with
        `rollout.mode=sync`; with a manager that cannot grade single responses, or that is
        registered in the driver's process only; and if only a reward model gives rewards.

    Raises:
        RewardError: as for `load_reward_manager`.
        ConfigError: as for `load_reward_manager`.
    """
    settings = config.reward_model
    is_model_alone = settings.enable and config.custom_reward_function.path is None
    if config.actor_rollout_ref.rollout.mode == "sync" or is_model_alone:
        return None
    name = settings.reward_manager
    # A manager that a user's script has registered is not known in this process.
    if not is_reference(name) and name not in _classes and name not in BUILT_IN:
        return None
    if not getattr(get_reward_manager_cls(name), "grades_early", False):
        return None

    num_workers = max(1, settings.num_workers // num_processes)
    settings = settings.model_copy(update={"num_workers": num_workers})
    return load_reward_manager(config.model_copy(update={"reward_model": settings}), tokenizer)
