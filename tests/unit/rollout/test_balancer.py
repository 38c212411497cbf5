# SPDX-License-Identifier: Apache-2.0
"""Several engines as one: who gets what, and what becomes of the requests of an engine that dies."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout import Completion, SamplingParams, ScriptedEngine
from quadriga.rollout.balancer import Balancer
from quadriga.weight_sync import Fingerprint


class Engine(ScriptedEngine):
    """Repeats the prompt; dies after so many requests of a batch or a stream, or refuses prompts that begin with 13."""

    def __init__(self, *, lives: int = 1000, delay_s: float = 0.0) -> None:
        super().__init__(lambda prompt: prompt)
        self.lives, self.delay_s = lives, delay_s
        self.asked: list[list[int]] = []
        self.copies: dict[str, torch.Tensor] = {}
        self.is_closed = False

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Any = None,
    ) -> list[Completion]:
        self.asked += map(list, prompts)
        self.lives -= len(prompts)
        if self.lives < 0:
            raise ConnectionError("the server has gone")
        for prompt in prompts:
            if prompt[0] == 13:
                raise RolloutError(
                    "engine", got="a prompt that begins with 13", expected="another one"
                )
        return super().generate_batch(prompts, sampling)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Any = None
    ) -> Completion:
        await asyncio.sleep(self.delay_s)
        return self.generate_batch([prompt_token_ids], [sampling])[0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weight_version = -1
        for name, tensor in weights:
            self.lives -= 1
            if self.lives < 0:
                raise ConnectionError("the server has gone")
            self.copies[name] = tensor.clone()
        super().load_weights(self.copies.items(), version)

    def close(self) -> None:
        if self.lives < 0:
            raise ConnectionError("nobody there")
        self.is_closed = True


def params(count: int, max_tokens: int = 10) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, seed=row) for row in range(count)]


def test_a_batch_is_shared_by_tokens_and_groups_stay_together() -> None:
    engines = [Engine(), Engine()]
    prompts = [[5] * 30, [6] * 3, [6] * 3, [7] * 3, [7] * 3]
    answers = Balancer(engines).generate_batch(prompts, params(5))
    assert [answer.token_ids for answer in answers] == [prompt[:10] for prompt in prompts]
    # 40 tokens on one side, twice 26 to share: the second group joins the lighter engine as a whole.
    shares = [{prompt[0] for prompt in engine.asked} for engine in engines]
    assert shares[0].isdisjoint(shares[1]) and shares[0] | shares[1] == {5, 6, 7}


def test_a_group_that_is_the_whole_batch_is_shared() -> None:
    engines = [Engine(), Engine()]
    Balancer(engines).generate_batch([[5, 6]] * 7, params(7))
    assert sorted(len(engine.asked) for engine in engines) == [3, 4]


def test_a_request_goes_where_the_fewest_tokens_are_in_flight() -> None:
    engines = [Engine(delay_s=0.02), Engine(delay_s=0.02)]
    balancer = Balancer(engines)

    async def several() -> list[Completion]:
        sizes = (100, 5, 5, 5)
        return await asyncio.gather(
            *(balancer.generate([1, 2], params(1, size)[0]) for size in sizes)
        )

    assert [answer.token_ids for answer in asyncio.run(several())] == [[1, 2]] * 4
    # The long one alone on one engine, the three short ones on the other.
    assert [len(engine.asked) for engine in engines] == [1, 3]
    assert balancer.in_flight == [0, 0]


@pytest.mark.parametrize("lives", [0, 2])
def test_requests_of_a_dead_engine_move(lives: int, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a batch; it is said, and the dead engine is not asked again."""
    engines = [Engine(lives=lives), Engine(), Engine()]
    balancer = Balancer(engines)
    prompts = [[number] * 4 for number in range(1, 10)]
    with caplog.at_level(logging.WARNING):
        answers = balancer.generate_batch(prompts, params(9))
    assert [answer.token_ids for answer in answers] == prompts
    assert "engine 0 of 3 gets no more requests, 2 are left: the server has gone" in caplog.text
    num_asked = len(engines[0].asked)
    balancer.generate_batch(prompts, params(9))
    assert len(engines[0].asked) == num_asked and balancer.alive == [1, 2]
    balancer.close()
    assert engines[1].is_closed and "which is dead, did not close: nobody there" in caplog.text


def test_a_task_of_a_dead_engine_moves() -> None:
    engines = [Engine(lives=1), Engine()]
    balancer = Balancer(engines)

    async def several() -> list[Completion]:
        return [await balancer.generate([number], params(1)[0]) for number in range(1, 6)]

    assert [answer.token_ids for answer in asyncio.run(several())] == [[1], [2], [3], [4], [5]]
    assert balancer.alive == [1] and balancer.in_flight == [0, 0]


def test_a_bad_request_is_not_an_engine_s_fault() -> None:
    """Every engine refuses it: its error is raised, and all engines stay."""
    balancer = Balancer([Engine(), Engine()])
    with pytest.raises(RolloutError, match="begins with 13"):
        balancer.generate_batch([[13]], params(1))
    with pytest.raises(RolloutError, match="begins with 13"):
        asyncio.run(balancer.generate([13], params(1)[0]))
    assert balancer.alive == [0, 1]


def test_all_engines_are_dead() -> None:
    balancer = Balancer([Engine(lives=0), Engine()])
    balancer.generate_batch([[1], [2]], params(2))
    balancer.engines[1].lives = 0
    with pytest.raises(
        RolloutError, match="engine 1 of 2: got ConnectionError: the server has gone"
    ) as caught:
        balancer.generate_batch([[1], [2]], params(2))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_task_that_is_cancelled_frees_its_tokens() -> None:
    balancer = Balancer([Engine(delay_s=10), Engine()])

    async def cancel() -> None:
        task = asyncio.create_task(balancer.generate([1], params(1)[0]))
        await asyncio.sleep(0.01)
        assert balancer.in_flight == [11, 0]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert balancer.in_flight == [0, 0] and balancer.alive == [0, 1]


def lent(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """One buffer, overwritten for each tensor: who does not copy in time reads the next one."""
    buffer = torch.zeros(1000)
    for number in range(count):
        buffer.fill_(number)
        yield f"w{number}", buffer


def test_weights_are_lent_to_all_at_once() -> None:
    engines = [Engine(), Engine(), Engine()]
    balancer = Balancer(engines)
    balancer.load_weights(lent(20), version=7)
    for engine in engines:
        assert [float(engine.copies[f"w{number}"].mean()) for number in range(20)] == list(
            range(20)
        )
        assert engine.weight_version == 7
    assert balancer.weight_version == 7
    assert balancer.fingerprint().tensors.keys() == {f"w{number}" for number in range(20)}


def test_an_engine_that_dies_while_it_loads_is_left() -> None:
    engines = [Engine(), Engine(lives=5), Engine()]
    balancer = Balancer(engines)
    balancer.load_weights(lent(20), version=1)
    assert balancer.alive == [0, 2] and balancer.weight_version == 1
    assert len(engines[2].copies) == 20


class Refuses(Engine):
    """Dies when it is to take weights, and tells it in the words of weights."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        error = ConnectionError("the process has ended")
        raise WeightSyncError("engine", got=f"no load: {error}") from error


def test_an_engine_that_is_dead_when_weights_come_is_left() -> None:
    balancer = Balancer([Refuses(), Engine()])
    balancer.load_weights(lent(3), version=1)
    assert balancer.alive == [1] and balancer.weight_version == 1
    with pytest.raises(WeightSyncError, match="no load: the process has ended"):
        Balancer([Refuses(), Refuses()]).load_weights(lent(3), version=1)


class Sleepless(Engine):
    """Has died meanwhile."""

    def sleep(self) -> None:
        raise ConnectionError("the process has ended")

    wake = abort = sleep


@pytest.mark.parametrize("call", ["sleep", "wake", "abort"])
def test_an_engine_that_died_meanwhile_is_left(call: str) -> None:
    engines = [Engine(), Sleepless(), Engine()]
    balancer = Balancer(engines)
    getattr(balancer, call)()
    assert balancer.alive == [0, 2]
    states = [engines[number]._state for number in balancer.alive]
    assert states == ["asleep" if call == "sleep" else "awake"] * 2
    with pytest.raises(RolloutError, match="ConnectionError: the process has ended"):
        getattr(Balancer([Sleepless(), Sleepless()]), call)()


def test_a_stream_that_breaks_is_an_error_of_the_stream() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from lent(2)
        raise WeightSyncError("sender", got="a lost peer")

    balancer = Balancer([Engine(), Engine()])
    with pytest.raises(WeightSyncError, match="sender: got a lost peer"):
        balancer.load_weights(broken(), version=1)
    assert balancer.weight_version == -1 and balancer.alive == [0, 1]
    with pytest.raises(RolloutError, match="not loaded completely"):
        balancer.generate_batch([[1]], params(1))


def test_engines_with_different_weights() -> None:
    engines = [Engine(), Engine()]
    balancer = Balancer(engines)
    balancer.load_weights(lent(3), version=1)
    engines[1].copies["w1"] = torch.ones(3)
    engines[1].load_weights(engines[1].copies.items(), version=1)
    with pytest.raises(
        WeightSyncError, match=r"engines 0 and 1 of a balancer: got other weights in 1 tensors: w1"
    ):
        balancer.fingerprint()


def test_no_engines() -> None:
    with pytest.raises(RolloutError, match="no engines"):
        Balancer([])


def test_an_engine_that_died_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """It gets requests once it has loaded the next weights; what moved and what was made again is counted."""
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine())
        return made[-1]

    balancer = Balancer([Engine(), Engine(lives=2)], makers=[make, make])
    prompts = [[number] * 4 for number in range(1, 9)]
    assert [one.token_ids for one in balancer.generate_batch(prompts, params(8))] == prompts
    assert balancer.counts == {"rollout/requests_moved": 4} and balancer.alive == [0]
    balancer._restarts.wait(10)
    balancer.generate_batch(prompts, params(8))
    assert len(made) == 1 and made[0].asked == []
    balancer.sleep()
    assert not balancer.has_frozen_weights
    balancer.load_weights([("a", torch.ones(3))], 7)
    balancer.wake()
    assert (
        balancer.alive == [0, 1] and balancer.engines[1] is made[0] and made[0].weight_version == 7
    )
    assert [one.token_ids for one in balancer.generate_batch(prompts, params(8))] == prompts
    assert len(made[0].asked) == 4 and balancer.counts["rollout/engine_restarts"] == 1
    assert "engine 1 of 2 is made again, after: the server has gone" in caplog.text
    balancer.close()
    assert made[0].is_closed


def test_an_engine_that_cannot_be_closed_leaves_no_other_open() -> None:
    engines = [Engine(), Engine(), Engine()]
    balancer = Balancer(engines)
    engines[1].lives = -1
    with pytest.raises(ConnectionError, match="nobody there"):
        balancer.close()
    assert [engine.is_closed for engine in engines] == [True, False, True]


def test_close_starts_no_engine() -> None:
    """A restart that is due would start an engine that nobody closes."""
    num_started = 0

    def fail() -> Engine:
        nonlocal num_started
        num_started += 1
        raise ConnectionError("no memory")

    balancer = Balancer([Engine(), Engine(lives=0)], makers=[fail, fail])
    balancer.generate_batch([[1], [2]], params(2))
    balancer._restarts.wait(10)
    assert not balancer.has_frozen_weights  # takes the error, and requests another restart
    balancer._restarts._due[1] = 0.0
    balancer.close()
    balancer._restarts.wait(10)
    assert num_started == 1


def test_progress_is_reported_during_a_batch_only() -> None:
    counts: list[int] = []
    balancer = Balancer([Engine(), Engine()])
    balancer.count_ended = counts.append
    balancer.generate_batch([[1], [2]], params(2))
    asyncio.run(balancer.engines[0].generate([3], params(1)[0]))
    assert counts == [1, 1]


def test_an_engine_that_comes_back_with_other_weights_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Forgetful(Engine):
        def fingerprint(self) -> Fingerprint:
            return Fingerprint({"a": "something else"})

    balancer = Balancer([Engine(), Engine(lives=0)], makers=[Engine, Forgetful])
    balancer.generate_batch([[1], [2]], params(2))
    balancer._restarts.wait(10)
    assert not balancer.has_frozen_weights
    balancer.load_weights([("a", torch.ones(3))], 7)
    assert balancer.alive == [0] and balancer.weight_version == 7
    assert (
        "engine 1 of 2, made again: got other weights in 1 tensors: a, expected those of the others"
        in caplog.text
    )
    balancer.close()


def test_an_engine_that_is_not_made_again_or_dies_of_the_weights_stays_dead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> Engine:
        raise ConnectionError("no memory")

    balancer = Balancer(
        [Engine(), Engine(lives=0), Engine(lives=0)], makers=[Engine, fail, lambda: Engine(lives=0)]
    )
    balancer.generate_batch([[1], [2], [3]], params(3))
    balancer._restarts.wait(10)
    assert not balancer.has_frozen_weights
    balancer.load_weights([("a", torch.ones(3))], 7)
    assert balancer.alive == [0] and "engine 1 of 3 did not start again: no memory" in caplog.text
    assert str(balancer.dead[2]) == "the server has gone"
    balancer.close()
