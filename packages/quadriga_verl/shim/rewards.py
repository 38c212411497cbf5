# SPDX-License-Identifier: Apache-2.0
"""Reward managers with verl's two interfaces, and adapters for them.

    workers.reward_manager         Manager(tokenizer, num_examine, compute_score, reward_fn_key, ...)
                                   manager(data, return_dict=True)
                                       -> {"reward_tensor", "reward_extra_info"}
    experimental.reward_loop       Manager(config, tokenizer, compute_score)
                                   await manager.run_single(data)
                                       -> {"reward_score", "reward_extra_info"}

Shapes: B responses, T response positions.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from omegaconf import OmegaConf
from torch import Tensor

from quadriga.background import EventLoopThread
from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards.managers.naive import overlong_penalty
from quadriga.rewards.outcome import read_outcome
from quadriga.rewards.registry import RewardManager, RewardOutput
from quadriga.rewards.registry import register as _register
from quadriga.rewards.samples import Samples, collect, read_samples
from quadriga.rewards.scoring import ITEM_ARGUMENTS, ScoreFunction
from quadriga.user_file import accepted_arguments
from quadriga_verl.shim.scores import default_compute_score

RawRewardFn = Callable[..., Any]
Columns: TypeAlias = dict[str, Any]
"""Values by the name of their column."""


# ---- adapters -----------------------------------------------------------------------------------


class _ManagerAdapter(RewardManager):
    """Reward manager of Quadriga that calls a manager of verl, in the driver's process.

    The manager gets verl's arguments and `reward_model.reward_kwargs`, as far as its class has
    parameters for them.

    Args:
        config: the resolved configuration.
        tokenizer: tokenizer of the policy.
    """

    manager_class: type[Any]  # set in subclasses, by `adapt_class`

    def __init__(self, config: Any, tokenizer: Any) -> None:
        # verl's managers read nested values as attributes too.
        tree = OmegaConf.create(config.model_dump(mode="json"))
        custom = config.custom_reward_function
        score = None
        if custom.path is not None:
            score = ScoreFunction(custom.path, custom.name, dict(custom.reward_kwargs)).load()
        arguments = {"tokenizer": tokenizer, "compute_score": score}
        arguments |= tree.reward_model.reward_kwargs
        self._thread: EventLoopThread | None = None
        # A manager of single responses runs in an event loop, in a thread of its own.
        if hasattr(self.manager_class, "run_single"):
            self._thread = EventLoopThread("quadriga-rewards")
            creation = self._make_manager({**arguments, "config": tree})
            self.manager = self._thread.submit(creation).result()
            return
        # A manager of batches runs in the thread of its caller.
        arguments["num_examine"] = 0
        arguments["compute_score"] = score or default_compute_score
        arguments["reward_fn_key"] = config.data.reward_fn_key
        self.manager = self.manager_class(**accepted_arguments(self.manager_class, arguments))

    async def _make_manager(self, arguments: Columns) -> Any:
        """Make the manager inside the event loop, because its constructor stores the running loop.

        Arguments for which the class has no parameters are left out.
        """
        return self.manager_class(**accepted_arguments(self.manager_class, arguments))

    def __call__(self, data: DataProto) -> RewardOutput:
        """Grade a batch.

        Raises:
            RewardError: the manager has returned no number for a response, or has another interface.
        """
        name = self.manager_class.__name__
        num_positions = data.batch["responses"].shape[1]
        rewards = None
        if self._thread is not None:
            rows = self._thread.submit(self._run_all(data)).result()
        else:
            rewards, rows = self._run_batch(data)
        outcomes = [read_outcome(row) for row in rows]
        for outcome in outcomes:
            if outcome.error:
                raise RewardError(name, got=outcome.error, expected="a number for each response")
        lengths = data.batch["attention_mask"][:, -num_positions:].long().sum(-1)
        # Nothing has failed, so `collect` needs only the lengths of the samples, and accepts no errors.
        output = collect(Samples([], lengths, num_positions, []), outcomes, 0.0)
        # Managers of batches return a reward for each token, not only for the last one.
        return output if rewards is None else replace(output, scores=rewards.float())

    async def _run_all(self, data: DataProto) -> list[Columns]:
        """Grade the responses by `run_single`, all at the same time.

        Returns:
            For each response, its score as "score" and its further columns.
        """
        singles = [data[row : row + 1] for row in range(len(data))]
        results = await asyncio.gather(*(self.manager.run_single(single) for single in singles))
        rows = []
        for result in results:
            columns = result.get("reward_extra_info") or {}
            rows.append({**columns, "score": result["reward_score"]})
        return rows

    def _run_batch(self, data: DataProto) -> tuple[Tensor, list[Columns]]:
        """Grade the responses together.

        Returns:
            Rewards [B, T]; and for each response its further columns, and a "score" of 0, which is not
            used but needed by `read_outcome`.

        Raises:
            RewardError: the rewards are not finite numbers [B, T], or a column has not B values.
        """
        result = self.manager(data, **accepted_arguments(self.manager, {"return_dict": True}))
        rewards = result
        columns = {}
        if isinstance(result, Mapping):
            rewards = result["reward_tensor"]
            columns = dict(result.get("reward_extra_info") or {})
        name = self.manager_class.__name__
        shape = data.batch["responses"].shape
        got = type(rewards).__name__
        if isinstance(rewards, Tensor):
            got = f"rewards of shape {list(rewards.shape)}"
        has_shape = isinstance(rewards, Tensor) and rewards.shape == shape
        if not has_shape or not rewards.isfinite().all():
            raise RewardError(name, got=got, expected=f"a tensor of finite numbers, {list(shape)}")
        for key, values in columns.items():
            if len(values) != len(data):
                where = f"{name}, reward_extra_info {key!r}"
                raise RewardError(where, got=f"{len(values)} values", expected=str(len(data)))
        rows = []
        for row in range(len(data)):
            row_columns = {key: values[row] for key, values in columns.items()}
            rows.append({**row_columns, "score": 0.0})
        return rewards, rows

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


class ExistingManager(_ManagerAdapter):
    """Adapter for an existing manager of batches, or for a function with the same interface.

    Unlike `_ManagerAdapter`, it does not make the manager from a configuration.

    Args:
        manager: the manager or the function.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.manager_class = type(manager)
        self._thread = None


def adapt_class(cls: Any) -> type[RewardManager]:
    """Return the class of Quadriga that adapts a class of verl's managers. It is made only once.

    It is stored as the attribute `quadriga_form`, so that a configuration may also name the manager as
    `file.py:Class`.
    """
    # `vars`, because a subclass must not use the adapter of its base class.
    if "quadriga_form" not in vars(cls):
        members = {
            "manager_class": cls,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        cls.quadriga_form = type(cls.__name__, (_ManagerAdapter,), members)
    return vars(cls)["quadriga_form"]


def register(name: str) -> Callable[[type[Any]], type[Any]]:
    """Class decorator that registers a manager for `reward_model.reward_manager=NAME`."""

    def decorate(cls: type[Any]) -> type[Any]:
        _register(name)(adapt_class(cls))
        return cls

    return decorate


class _AutoAdapted:
    """Base class of verl's managers that makes an adapter for each subclass."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt_class(cls)


# ---- managers of batches ------------------------------------------------------------------------


class AbstractRewardManager(_AutoAdapted, ABC):
    """Base class of verl's managers of whole batches."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | Columns:
        """Grade a batch.

        Args:
            data: the batch.
            return_dict: whether to return a dictionary.

        Returns:
            Rewards [B, T]; or a dictionary with "reward_tensor", the rewards, and
            "reward_extra_info", further columns by name.
        """


class NaiveRewardManager(AbstractRewardManager):
    """Manager that calls `compute_score` for each response, in this process.

    The score is the reward of the response's last token.

    Args:
        tokenizer: decodes the responses.
        num_examine: ignored; samples are logged by the trainer.
        compute_score: the score function. None: the grader of the data source.
        reward_fn_key: column with the data source.
        kwargs: ignored.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | Columns:
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        lengths = samples.lengths.tolist()
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        columns: dict[str, list[Any]] = defaultdict(list)
        for row, (sample, length) in enumerate(zip(samples.rows, lengths, strict=True)):
            graded = self.compute_score(**{name: sample[name] for name in ITEM_ARGUMENTS})
            score, details = self.response_reward(graded, length)
            for key, value in details.items():
                columns[key].append(value)
            # At the last token; an empty response has its reward at the first position.
            rewards[row, max(length, 1) - 1] = score
        return {"reward_tensor": rewards, "reward_extra_info": columns} if return_dict else rewards

    def response_reward(self, graded: Any, length: int) -> tuple[float, Columns]:
        """Reward of a response, and its further columns.

        Args:
            graded: result of the score function: a number, or a dictionary with "score".
            length: number of tokens in the response.
        """
        details = dict(graded) if isinstance(graded, Mapping) else {}
        return details.get("score", graded), details


class DAPORewardManager(NaiveRewardManager):
    """Manager that adds DAPO's penalty for long responses to the scores; see `managers.naive`.

    Args:
        args: as for `NaiveRewardManager`.
        max_resp_len: longest response, in tokens.
        overlong_buffer_cfg: settings of the penalty.
        kwargs: as for `NaiveRewardManager`.
    """

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = overlong_buffer_cfg

    def response_reward(self, graded: Any, length: int) -> tuple[float, Columns]:
        score, details = super().response_reward(graded, length)
        buffer = self.overlong_buffer_cfg or {}
        penalty, penalty_columns = overlong_penalty(length, self.max_resp_len, buffer)
        return score + penalty, {**details, **penalty_columns}


# ---- managers of single responses ---------------------------------------------------------------


class RewardManagerBase(_AutoAdapted, ABC):
    """Base class of verl's managers of single responses.

    `self.loop` is the event loop in which `run_single` runs.

    Args:
        config: the configuration, as an OmegaConf tree.
        tokenizer: decodes the responses.
        compute_score: the score function. None: the grader of the data source.
        kwargs: ignored.
    """

    _class_initialized = False

    def __init__(
        self, config: Any, tokenizer: Any, compute_score: RawRewardFn | None = None, **kwargs: Any
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.loop = asyncio.get_running_loop()
        self.compute_score: Callable[..., Any] = compute_score or default_compute_score
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Prepare state that all managers of the class share."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: DataProto) -> Columns:
        """Grade a batch of one response.

        Returns:
            "reward_score", and "reward_extra_info", further columns by name.
        """


class SingleRewardManager(RewardManagerBase):
    """verl's manager `naive` for single responses. A `compute_score` that is not async runs in a thread."""

    async def run_single(self, data: DataProto) -> Columns:
        (sample,) = read_samples(data, self.tokenizer, self.config.data.reward_fn_key).rows
        arguments = {name: sample[name] for name in ITEM_ARGUMENTS}
        if self.is_async_reward_score:
            graded = await self.compute_score(**arguments)
        else:
            graded = await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))
        columns = dict(graded) if isinstance(graded, Mapping) else {"acc": graded}
        return {"reward_score": columns.get("score", graded), "reward_extra_info": columns}


class SingleDAPORewardManager(SingleRewardManager):
    """verl's manager `dapo` for single responses: `naive` with the penalty for long responses."""

    async def run_single(self, data: DataProto) -> Columns:
        result = await super().run_single(data)
        kwargs = self.config.reward_model.reward_kwargs
        num_positions = data.batch["responses"].shape[1]
        # The batch has one row, whose last columns are those of the response.
        length = int(data.batch["attention_mask"][0, -num_positions:].sum())
        buffer = kwargs.get("overlong_buffer_cfg") or {}
        penalty, columns = overlong_penalty(length, kwargs.get("max_resp_len"), buffer)
        return {
            "reward_score": result["reward_score"] + penalty,
            "reward_extra_info": {**result["reward_extra_info"], **columns},
        }
