# SPDX-License-Identifier: Apache-2.0
"""The stand-in itself: what it says of tensors, counts and finds; test_defects.py has it look at the package."""

import threading
from typing import Any

import pytest
import torch

from tests.rehearsal.stand_in import StandIn


def take(owner: StandIn) -> list[str]:
    """The findings so far, which are no failure of the test."""
    found, owner.findings[:] = list(owner.findings), []
    return found


def test_tensors_know_where_they_are(stand_in: StandIn) -> None:
    host = torch.randn(3, 4)
    there = host.to("cuda")
    assert (there.device, there.is_cuda, host.is_cuda) == (torch.device("cuda:0"), True, False)
    assert (there.view(-1)[2:] @ there.view(-1)[2:]).is_cuda
    assert torch.equal(there.cpu(), host) and there.cpu().data_ptr() != there.data_ptr()
    assert torch.nn.Linear(4, 2).to("cuda")(there).device.index == 0
    with pytest.raises(TypeError, match="can't convert cuda"):
        there.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.empty(1, device="cuda:7")


def test_gradients_and_threads(stand_in: StandIn) -> None:
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.is_cuda
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(2, device="cuda").device))
    thread.start()
    thread.join()
    assert seen == [torch.device("cuda:0")]


def test_gradients_that_are_missing(stand_in: StandIn) -> None:
    """The engine fills them with zeros on their device. A function in Python has to choose it."""

    class HostZeros(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + torch.zeros(2)

    parts = torch.ones(4, device="cuda", requires_grad=True)
    first, _ = parts.split([2, 2])
    first.sum().backward()
    assert parts.grad is not None
    assert parts.grad.is_cuda
    assert parts.grad.tolist() == [1, 1, 0, 0]
    whole = torch.ones(2, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="same device"):
        HostZeros.apply(whole).sum().backward()
    assert len(take(stand_in)) == 1


def test_counts(stand_in: StandIn) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        pinned = torch.ones(4).pin_memory()
        there = pinned.to("cuda", non_blocking=True)
        event.record()
    event.synchronize()
    back = torch.empty(4, pin_memory=True).copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert back.tolist() == [1.0] * 4
    torch.cuda.empty_cache()
    counted = ("streams", "events", "pinned buffers", "asynchronous copies", "empty_cache")
    assert [stand_in.counts[name] for name in counted] == [1, 1, 2, 2, 1]


def test_a_graph_computes_its_operators_again(stand_in: StandIn) -> None:
    static = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = static.view(1, 2) * 2
        static.add_(1)
    static.fill_(5)
    graph.replay()
    assert doubled.cpu().tolist() == [[10.0, 10.0]] and static.cpu().tolist() == [6.0, 6.0]
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(graph),
    ):
        float(static.sum())


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, bool, float, torch.Tensor.tolist, torch.Tensor.cpu, torch.nonzero]
)
def test_a_read_in_a_step(stand_in: StandIn, read) -> None:
    number = torch.ones((), device="cuda")
    with stand_in.no_host_reads("a step"):
        read(number)
    assert "makes the host wait in a step" in take(stand_in)[0]


def test_an_asynchronous_copy_of_memory_that_is_not_pinned(stand_in: StandIn) -> None:
    """To the device, from it, and one that is read before anything waited for it."""
    there = torch.ones(2).to("cuda", non_blocking=True)
    torch.empty(2).copy_(there, non_blocking=True)
    torch.empty(2, pin_memory=True).copy_(there, non_blocking=True).tolist()
    found = take(stand_in)
    expected = (
        "to the device from memory that is not pinned",
        "to memory that is not pinned",
        "nothing waited for",
    )
    assert len(found) == 3
    assert all(words in one for words, one in zip(expected, found, strict=True))
