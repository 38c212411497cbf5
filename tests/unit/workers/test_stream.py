# SPDX-License-Identifier: Apache-2.0
"""A stream whose driver is another process: what it is told and asked, with the engine in a thread of this one."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch

from quadriga.config import Config
from quadriga.errors import RolloutError, WeightSyncError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rollout.interface import Completion
from quadriga.workers import ActorRolloutRefWorker
from quadriga.workers.generation import ResponseGenerator
from quadriga.workers.stream import GenerationStream, ServedStream, WeightCopy, join_shares


@pytest.fixture
def actor(config: Config, tokenizer: Any) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(config, tokenizer, role="actor")
    worker.init_model()
    return worker


@pytest.fixture(params=[False, True], ids=["goes on", "waits"])
def stream(
    request: pytest.FixtureRequest, config: Config, tokenizer: Any
) -> Iterator[ServedStream]:
    own: dict[str, Any] = {"is_beside_training": False, "num_processes": 1}
    made = ServedStream(
        ResponseGenerator(config, tokenizer, torch.device("cpu"), torch.float32, **own),
        waits=request.param,
    )
    yield made
    made.close()


def copies(actor: ActorRolloutRefWorker) -> DataProtoFuture:
    return DataProtoFuture(list, [actor.copy_weights()], resolve=list)


def events(stream: ServedStream, count: int) -> list[tuple[str, int, Any]]:
    found: list[tuple[str, int, Any]] = []
    while len(found) < count:
        told = stream.events()
        for _ in told:
            stream.go_on()
        found += told
    return found


def test_shares_of_ranks_are_joined_in_the_order_of_the_model() -> None:
    """Of five tensors three ranks have two, two and one."""
    names = ["a", "b", "c", "d", "e"]
    shares = []
    for rank in range(3):
        weights = {name: torch.full((2,), names.index(name)) for name in names[rank::3]}
        shares.append(WeightCopy(weights, {name: f"mark of {name}" for name in weights}))
    joined = join_shares(shares)
    assert list(joined.weights) == names
    assert [int(tensor[0]) for tensor in joined.weights.values()] == [0, 1, 2, 3, 4]
    assert joined.fingerprints == {name: f"mark of {name}" for name in names}


def test_weights_are_awaited_and_groups_told_of(
    stream: ServedStream, actor: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    """Weights may be announced before they are there, or be there before; each group's rows come once."""
    stream.await_weights(3, keeps_cache=False)
    assert stream.events() == []
    stream.give_weights(3, copies(actor))
    assert events(stream, 1) == [("loaded", 3, 3)]
    stream.start({5: prompts[:2], 6: prompts[2:]})
    stream.give_weights(4, copies(actor))
    stream.await_weights(4, keeps_cache=True)
    told = events(stream, 3)
    groups = {number: rows for kind, number, rows in told if kind == "ended"}
    assert groups.keys() == {5, 6} and stream.num_open == 0 and ("loaded", 4, 4) in told
    assert set(groups[5].batch["token_versions"].unique().tolist()) <= {-1, 3, 4}
    stream.await_weights(5, keeps_cache=False)
    stream.give_weights(5, None)
    assert events(stream, 1) == [("loaded", 5, 4)], "without weights it keeps the older"


def test_what_has_ended_before_its_caller_looks_holds_nobody(
    stream: ServedStream,
    actor: ActorRolloutRefWorker,
    prompts: DataProto,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a slow machine the engine may be through before the call that asked for it goes on."""
    work, begin = stream.engine.between_steps, stream.engine.begin

    def late_work(*args: Any, **kwargs: Any) -> Any:
        wait([done := work(*args, **kwargs)])
        return done

    def late_begin(*args: Any) -> Any:
        wait(futures := begin(*args))
        return futures

    monkeypatch.setattr(stream.engine, "between_steps", late_work)
    monkeypatch.setattr(stream.engine, "begin", late_begin)
    stream.give_weights(1, copies(actor))
    stream.await_weights(1, keeps_cache=False)
    assert events(stream, 1) == [("loaded", 1, 1)]
    stream.start({2: prompts[:2], 3: prompts[2:]})
    assert {(kind, number) for kind, number, _ in events(stream, 2)} == {("ended", 2), ("ended", 3)}


def test_the_engine_makes_no_step_before_the_driver_knows(
    stream: ServedStream,
    actor: ActorRolloutRefWorker,
    prompts: DataProto,
    request: pytest.FixtureRequest,
) -> None:
    """Where it waits, nothing that is begun meanwhile goes on."""
    stream.await_weights(1, keeps_cache=False)
    stream.give_weights(1, copies(actor))
    events(stream, 1)
    stream.start({1: prompts[:2]})
    while not (told := stream.events()):
        pass
    stream.start({2: prompts[2:]})
    if "waits" in request.node.name:
        assert stream.events() == [], "a group of a few tokens takes no second"
    for _ in told:
        stream.go_on()
    assert [(kind, number) for kind, number, _ in events(stream, 1)] == [("ended", 2)]


def test_what_fails_is_told(
    stream: ServedStream, actor: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    stream.await_weights(1, keeps_cache=False)
    copied = copies(actor)
    next(iter(copied.get()[0].weights.values())).add_(1)
    stream.give_weights(1, copied)
    with pytest.raises(WeightSyncError, match="that differ"):
        events(stream, 1)
    assert stream.weight_version == -1
    with pytest.raises(RolloutError, match="not loaded completely"):
        stream.start({1: prompts[:2]})


def test_a_save_leaves_out_a_group_that_is_aborted_meanwhile(
    stream: ServedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may cancel the futures of a group after the save has listed them."""
    cancelled: Future[Completion] = Future()
    cancelled.cancel()
    ended: Future[Completion] = Future()
    ended.set_result(Completion([5], [0.0], "stop", 1))
    monkeypatch.setattr(stream, "_open", {1: [cancelled], 2: [ended]})
    monkeypatch.setattr(stream.engine, "between_steps", lambda work, **_: work())
    saved: list[Any] = []
    stream.save(lambda _, responses: saved.extend(responses))
    assert [group for group, *_ in saved] == [2]


def test_the_end_of_a_group_counts_the_step_in_which_it_ends(
    config: Config, tokenizer: Any, actor: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    """A save that follows from it is found at the same step by a repetition, in which nothing else is under way."""
    counts: list[int] = []
    generation = ResponseGenerator(
        config,
        tokenizer,
        torch.device("cpu"),
        torch.float32,
        is_beside_training=False,
        num_processes=1,
    )
    stream = GenerationStream(generation, lambda *_: counts.append(stream.engine.num_steps))
    stream.load(lambda: copies(actor), 0, keeps_cache=False).result()
    stream.start({1: prompts[:2]})
    while not counts:
        time.sleep(0.01)
    stream.close()
    assert counts == [stream.engine.num_steps]


def test_ends_of_groups_are_told_together_until_their_batch_is_whole(
    stream: ServedStream,
    actor: ActorRolloutRefWorker,
    prompts: DataProto,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where the driver decides of each: there an event waits for no other."""
    monkeypatch.setattr("quadriga.workers.stream.TOGETHER_WITHIN_S", 60.0)
    monkeypatch.setattr("quadriga.workers.stream.EVENTS_WITHIN_S", 60.0)
    stream._batches |= {1: 7, 2: 7, 3: 8}
    stream._open |= {2: [], 3: []}
    stream._report("ended", 1, lambda: "first")
    threading.Timer(
        0.2, lambda: (stream._open.pop(2), stream._report("ended", 2, lambda: "second"))
    ).start()
    told = stream.events()
    assert (
        told
        == [("ended", 1, "first"), ("ended", 2, "second")][: 1 if stream._reports_at_once else 2]
    )
    assert len(told) == 2 or stream.events() == [("ended", 2, "second")]
