# SPDX-License-Identifier: Apache-2.0
"""Reward managers of verl's contracts, registered as ours.

    workers.reward_manager               manager(tokenizer, num_examine, compute_score, reward_fn_key, **reward_kwargs)
                                         manager(data, return_dict=True) -> {"reward_tensor", "reward_extra_info"}
    experimental.reward_loop             manager(config, tokenizer, compute_score)
                                         await manager.run_single(data) -> {"reward_score", "reward_extra_info"}

Shapes: B responses of up to T tokens.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from quadriga.background import EventLoopThread
from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards.managers.naive import punishment_of
from quadriga.rewards.outcome import read_outcome
from quadriga.rewards.registry import RewardManager, RewardOutput
from quadriga.rewards.registry import register as _register
from quadriga.rewards.samples import Samples, collect, read_samples
from quadriga.rewards.scoring import ITEM_ARGUMENTS, ScoreFunction
from quadriga.user_file import taken
from quadriga_verl.shim.scores import default_compute_score

RawRewardFn = Callable[..., Any]


class _Adapted(RewardManager):
    """A manager of verl's in ours: the responses of a batch are graded together, on the driver."""

    manager_class: type[Any]

    def __init__(self, config: Any, tokenizer: Any) -> None:
        # As verl's configuration its nested values are read as attributes too.
        tree = OmegaConf.create(config.model_dump(mode="json"))
        custom, kwargs, score = config.custom_reward_function, tree.reward_model.reward_kwargs, None
        if custom.path is not None:
            score = ScoreFunction(custom.path, custom.name, dict(custom.reward_kwargs)).load()
        self._thread = (
            EventLoopThread("quadriga-rewards")
            if hasattr(self.manager_class, "run_single")
            else None
        )
        offered = {"tokenizer": tokenizer, "compute_score": score, **kwargs}
        if self._thread is not None:
            # Its loop is the one that runs when it is made.
            self.manager = self._thread.submit(self._made({**offered, "config": tree})).result()
            return
        offered |= {"num_examine": 0, "compute_score": score or default_compute_score}
        offered["reward_fn_key"] = config.data.reward_fn_key
        self.manager = self.manager_class(**taken(self.manager_class, offered))

    async def _made(self, offered: dict[str, Any]) -> Any:
        return self.manager_class(**taken(self.manager_class, offered))

    def __call__(self, data: DataProto) -> RewardOutput:
        name, shape, rewards = self.manager_class.__name__, data.batch["responses"].shape, None
        if self._thread is not None:
            found = self._thread.submit(self._run_all(data)).result()
            rows = [
                {**(one.get("reward_extra_info") or {}), "score": one["reward_score"]}
                for one in found
            ]
        else:
            found = self.manager(data, **taken(self.manager, {"return_dict": True}))
            rewards = found["reward_tensor"] if isinstance(found, Mapping) else found
            if (
                not isinstance(rewards, Tensor)
                or rewards.shape != shape
                or not rewards.isfinite().all()
            ):
                is_tensor = isinstance(rewards, Tensor)
                got = (
                    f"rewards of shape {list(rewards.shape)}"
                    if is_tensor
                    else type(rewards).__name__
                )
                raise RewardError(
                    name, got=got, expected=f"a tensor of finite numbers, {list(shape)}"
                )
            extra = dict(found.get("reward_extra_info") or {}) if isinstance(found, Mapping) else {}
            for key, values in extra.items():
                if len(values) != len(data):
                    where = f"{name}, reward_extra_info {key!r}"
                    raise RewardError(where, got=f"{len(values)} values", expected=str(len(data)))
            rows = [
                {**{key: values[row] for key, values in extra.items()}, "score": 0.0}
                for row in range(len(data))
            ]
        outcomes = list(map(read_outcome, rows))
        if error := next((one.error for one in outcomes if one.error), ""):
            raise RewardError(name, got=error, expected="a number for each response")
        lengths = data.batch["attention_mask"][:, -shape[1] :].long().sum(-1)
        output = collect(Samples([], lengths, shape[1], []), outcomes, 0.0)
        return output if rewards is None else replace(output, scores=rewards.float())

    async def _run_all(self, data: DataProto) -> list[dict[str, Any]]:
        return await asyncio.gather(
            *(self.manager.run_single(data[row : row + 1]) for row in range(len(data)))
        )

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


class GivenManager(_Adapted):
    """A manager that is there, or a function of its contract."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.manager_class, self._thread = manager, type(manager), None


def adapt(cls: Any) -> type[RewardManager]:
    """A manager of verl's as one of ours, which `file.py:Class` finds by the attribute."""
    if "quadriga_form" not in vars(cls):
        home = {
            "manager_class": cls,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        cls.quadriga_form = type(cls.__name__, (_Adapted,), home)
    return vars(cls)["quadriga_form"]


def register(name: str) -> Callable[[type[Any]], type[Any]]:
    """verl's class decorator, of either contract: known as `reward_model.reward_manager=NAME`."""

    def decorate(cls: type[Any]) -> type[Any]:
        _register(name)(adapt(cls))
        return cls

    return decorate


class _Verls:
    """A class of managers that `file.py:Class` finds in our form."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt(cls)


class AbstractRewardManager(_Verls, ABC):
    """What verl's managers of whole batches derive from."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """The rewards [B, T] of a batch, or a dict with these as "reward_tensor", and "reward_extra_info"."""


class NaiveRewardManager(AbstractRewardManager):
    """One call of `compute_score` a response, in this process; its score stands at the response's last token."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        for row, (sample, length) in enumerate(
            zip(samples.rows, samples.lengths.tolist(), strict=True)
        ):
            arguments = {name: sample[name] for name in ITEM_ARGUMENTS}
            graded = self.compute_score(**arguments)
            score, told = self.shaped(graded, length)
            for key, value in told.items():
                extra[key].append(value)
            rewards[row, max(length, 1) - 1] = score
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    def shaped(self, graded: Any, length: int) -> tuple[float, dict[str, Any]]:
        """The reward of a response of `length` tokens, and what else is known of it."""
        told = dict(graded) if isinstance(graded, Mapping) else {}
        return told.get("score", graded), told


class DAPORewardManager(NaiveRewardManager):
    """The same, less the punishment of over-long responses (`quadriga.rewards.managers.naive`)."""

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.max_resp_len, self.overlong_buffer_cfg = max_resp_len, overlong_buffer_cfg

    def shaped(self, graded: Any, length: int) -> tuple[float, dict[str, Any]]:
        score, told = super().shaped(graded, length)
        punishment, said = punishment_of(length, self.max_resp_len, self.overlong_buffer_cfg or {})
        return score + punishment, {**told, **said}


class RewardManagerBase(_Verls, ABC):
    """What verl's managers of single responses derive from; `self.loop` is the loop in which `run_single` runs."""

    _class_initialized = False

    def __init__(
        self, config: Any, tokenizer: Any, compute_score: RawRewardFn | None = None, **kwargs: Any
    ) -> None:
        self.config, self.tokenizer, self.loop = config, tokenizer, asyncio.get_running_loop()
        self.compute_score: Callable[..., Any] = compute_score or default_compute_score
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Prepares what all managers of the class share."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """The reward of one response: "reward_score", and "reward_extra_info" with what else is known of it."""


class SingleRewardManager(RewardManagerBase):
    """verl's `naive` of single responses: one call of `compute_score`, plain ones in a thread."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        (sample,) = read_samples(data, self.tokenizer, self.config.data.reward_fn_key).rows
        arguments = {name: sample[name] for name in ITEM_ARGUMENTS}
        if self.is_async_reward_score:
            graded = await self.compute_score(**arguments)
        else:
            graded = await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))
        extra = dict(graded) if isinstance(graded, Mapping) else {"acc": graded}
        return {"reward_score": extra.get("score", graded), "reward_extra_info": extra}


class SingleDAPORewardManager(SingleRewardManager):
    """The same, less the punishment of over-long responses."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        found, kwargs = await super().run_single(data), self.config.reward_model.reward_kwargs
        length = int(data.batch["attention_mask"][0, -data.batch["responses"].shape[1] :].sum())
        buffer = kwargs.get("overlong_buffer_cfg") or {}
        punishment, said = punishment_of(length, kwargs.get("max_resp_len"), buffer)
        extra = {**found["reward_extra_info"], **said}
        return {"reward_score": found["reward_score"] + punishment, "reward_extra_info": extra}
