# SPDX-License-Identifier: Apache-2.0
"""Weights that go to other processes arrive as they were sent, or nothing is generated with them.

Sender and receivers are threads here; what it does not prove: nccl, several machines.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from quadriga.errors import EngineError, WeightSyncError
from quadriga.weight_sync import Fingerprint, WeightReceiver, WeightSender, broadcast, fingerprint
from quadriga.weight_sync.broadcast import Channel
from tests.limits import SOON_S

CPU = torch.device("cpu")
NAMES = ("embed", "layer", "norm", "head")


class Rollout:
    """Holds weights by name; refuses those named in `refuses`, and forgets to copy those in `deaf_to`."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, refuses: str = "", deaf_to: str = ""
    ) -> None:
        self.weights = {name: torch.zeros(30, 4, dtype=dtype) for name in NAMES}
        self.refuses, self.deaf_to, self.weight_version = refuses, deaf_to, 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for name, tensor in weights:
            if name == self.refuses:
                raise EngineError(f"weight {name}", got="no room")
            if name != self.deaf_to:
                self.weights[name].copy_(tensor)
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights.items()

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.weights.items())


class Line:
    """A sender and its receivers."""

    def __init__(self, num_receivers: int, bucket_bytes: int = 2000) -> None:
        self.sender = WeightSender("localhost", range(num_receivers), CPU, bucket_bytes)
        self.receivers = [
            WeightReceiver(self.sender.address, rank, CPU) for rank in range(num_receivers)
        ]

    def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], targets: list[Rollout], version: int
    ) -> list[Exception | None]:
        """Send and receive at the same time. Returns what each raised, the sender first."""
        with ThreadPoolExecutor(len(targets) + 1) as threads:
            futures = [threads.submit(self.sender.publish, weights, version)]
            for receiver, target in zip(self.receivers, targets, strict=True):
                futures.append(threads.submit(receiver.receive, target, version))
            errors = [future.exception(timeout=SOON_S) for future in futures]
        assert all(error is None or isinstance(error, Exception) for error in errors)
        return [error if isinstance(error, Exception) else None for error in errors]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()


@pytest.fixture
def line() -> Iterator[Callable[[int], Line]]:
    """Makes lines."""
    lines: list[Line] = []

    def make(num_receivers: int) -> Line:
        lines.append(Line(num_receivers))
        return lines[-1]

    yield make
    for one in lines:
        one.close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(30, 4, generator=generator) for name in NAMES}


def holds(target: Rollout, sent: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(target.weights[name], tensor.to(target.weights[name].dtype))
        for name, tensor in sent.items()
    )


def test_every_receiver_has_every_publication(line: Callable[..., Line]) -> None:
    """Two receivers, one of another dtype; several publications through one channel."""
    both, targets = line(2), [Rollout(), Rollout(torch.bfloat16)]
    for version in (0, 1, 7):
        assert both.publish(weights(version).items(), targets, version) == [None, None, None]
        assert all(
            holds(target, weights(version)) and target.weight_version == version
            for target in targets
        )
        for receiver, target in zip(both.receivers, targets, strict=True):
            receiver.verify(target, version)


def test_weights_that_change_in_the_rollout_are_named(line: Callable[..., Line]) -> None:
    """Also long after they came; and those of another version."""
    one, target = line(1), Rollout()
    assert one.publish(weights(1).items(), [target], 1) == [None, None]
    with pytest.raises(WeightSyncError, match="got version 1, expected version 2"):
        one.receivers[0].verify(target, 2)
    target.weights["norm"][3, 1] += 1e-3
    with pytest.raises(WeightSyncError, match=r"version 1: got 1 of 4 weights that differ: norm,"):
        one.receivers[0].verify(target, 1)


class Corrupting:
    """A channel that turns over one bit of the number in a tensor's first byte."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel, self.name, self.is_on = channel, name, True

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        header, content = self.channel.receive()
        for entry in header.get("entries", ()):
            name, *_, offset = entry
            if name == self.name and self.is_on:
                content[offset] ^= 1
        return header, content

    def close(self) -> None:
        self.channel.close()


def test_a_tensor_that_is_corrupted_on_the_way_is_named(line: Callable[..., Line]) -> None:
    """One bit. The rollout then has no weights that it may generate with; the next publication heals it."""
    both, targets = line(2), [Rollout(), Rollout()]
    both.receivers[1].channel = corrupting = Corrupting(both.receivers[1].channel, "layer")
    sent, whole, broken = both.publish(weights(1).items(), targets, 1)
    assert sent is None and whole is None
    assert isinstance(broken, WeightSyncError)
    assert "1 of 4 weights that changed in transfer: layer," in str(broken)
    assert [target.weight_version for target in targets] == [1, -1]
    corrupting.is_on = False
    assert both.publish(weights(2).items(), targets, 2) == [None, None, None]
    assert holds(targets[1], weights(2))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"refuses": "layer"}, "weight layer: got no room"),
        ({"deaf_to": "norm"}, "1 of 4 weights that differ: norm"),
    ],
)
def test_a_rollout_that_does_not_take_them_holds_nobody_up(
    line: Callable[..., Line], fault: dict[str, str], said: str
) -> None:
    """The others have the weights; it raises, and a later publication reaches it."""
    both, target, other = line(2), Rollout(**fault), Rollout()
    sent, broken, whole = both.publish(weights(1).items(), [target, other], 1)
    assert sent is None and whole is None and holds(other, weights(1))
    assert said in str(broken) and target.weight_version == -1
    target.refuses = target.deaf_to = ""
    assert both.publish(weights(2).items(), [target, other], 2) == [None, None, None]
    assert holds(target, weights(2))


@pytest.mark.parametrize(
    "error", [MemoryError("out of memory at layer"), WeightSyncError("layer", got="out of memory")]
)
def test_a_trainer_that_fails_in_the_middle_is_told_of(
    error: Exception, line: Callable[..., Line]
) -> None:
    """Its own error is raised there, and a WeightSyncError with its words in the rollout."""

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", torch.ones(30, 4)
        raise error

    one, target = line(1), Rollout()
    sent, received = one.publish(failing(), [target], 1)
    assert sent is error
    assert isinstance(received, WeightSyncError)
    assert f"{type(error).__name__}: " in str(received) and "out of memory" in str(received)
    assert target.weight_version == -1
    assert one.publish(weights(2).items(), [target], 2) == [None, None]


def test_weights_of_another_version(line: Callable[..., Line]) -> None:
    one, target = line(1), Rollout()
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(one.sender.publish, weights(1).items(), 4)
        received = threads.submit(one.receivers[0].receive, target, 5)
        assert sent.exception(60) is None
        with pytest.raises(WeightSyncError, match="version 5: got version 4"):
            received.result(60)
    assert target.weight_version == -1


def test_a_receiver_that_is_gone(line: Callable[..., Line]) -> None:
    """The sender's error says that it was left alone."""
    one = line(1)
    assert one.publish(weights(1).items(), [Rollout()], 1) == [None, None]
    one.receivers[0].close()
    with pytest.raises(WeightSyncError, match=r"process 0 of 2 in a .*left alone"):
        for version in range(2, 50):
            one.sender.publish(weights(version).items(), version)


def test_a_receiver_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was killed on its way: the others wait for a minute, here for a second, and not for half an hour."""
    monkeypatch.setattr(broadcast, "MEETING_TIMEOUT", timedelta(seconds=1))
    sender = WeightSender("localhost", [0, 2], CPU, 2000)
    receiver = WeightReceiver(sender.address, 2, CPU)
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receiver.receive, Rollout(), 1)
        with pytest.raises(WeightSyncError, match="process 0 of 3 in the meeting"):
            sender.publish([("a", torch.ones(2))], 1)
        assert isinstance(received.exception(), WeightSyncError)
