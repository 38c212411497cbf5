# SPDX-License-Identifier: Apache-2.0
"""What torch.cuda and NCCL are on the stand-in: streams, events, graphs, the allocator and the current device, counted.

Everything is done at once and in the order of the program. A graph holds the operators of its capture, and a replay
computes them again into the same memory. The `owner` is a `StandIn` (stand_in.py).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.cuda._utils import _get_device_index
from torch.utils._pytree import tree_leaves

from quadriga.models.flash import ScoreRule, plain_forward

MEMORY_BYTES = 80 << 30
_LARGE = 4096
HALF = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


def wide_product(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, **out: torch.Tensor
) -> torch.Tensor:
    """A product of half-precision factors with float32 sums, which a CPU does not have."""
    if left.dtype != right.dtype:
        raise RuntimeError(f"expected operands of one dtype, got {left.dtype} and {right.dtype}")
    return torch.matmul(left.to(dtype), right.to(dtype), **out)


def wide_sum(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: Any, **out: torch.Tensor
) -> Any:
    """A float32 matrix plus such a product."""
    return torch.add(base, wide_product(left, right, dtype), **out)


def hidden_pairs(
    num_queries: int, num_keys: int, is_causal: bool, window: Mapping[str, int]
) -> torch.Tensor:
    """[L, S]: which keys a query does not see; it and as many before it as the window has to its left."""
    behind = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    is_hidden = (behind < 0) & is_causal
    return is_hidden | (behind > window["window_size_left"]) if window else is_hidden


def runs_of(lengths: Any, parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors [tokens, ...] cut at offsets, each run as one row [1, L, ...]."""
    assert lengths.dtype == torch.int32 and all(len(one) == lengths[-1] for one in parts)
    return [[one[start:stop][None] for one in parts] for start, stop in pairwise(lengths.tolist())]


def flash_forward(query: Any, key: Any, value: Any, *more: Any, scale: float, **window: int) -> Any:
    """The flash kernel by plain operators; like it, for one half dtype and dense heads."""
    inputs, (queries, keys, longest, most, *rest) = (query, key, value), more
    if queries is not None:  # runs between these offsets
        cut = zip(runs_of(queries, [query]), runs_of(keys, [key, value]), strict=True)
        assert (longest, most) == (int(queries.diff().max()), int(keys.diff().max()))
        found = [
            flash_forward(*own, *seen, None, None, 0, 0, *rest, scale=scale, **window)
            for own, seen in cut
        ]
        return (
            torch.cat([one[0][0] for one in found]),
            torch.cat([one[1][0] for one in found], 1),
            *found[0][2:],
        )
    assert all(
        one.dtype in HALF and one.dtype == query.dtype and one.stride(-1) == 1 for one in inputs
    )
    bias = torch.zeros(query.shape[1], key.shape[1])
    bias.masked_fill_(hidden_pairs(*bias.shape, rest[1], window), -torch.inf)
    out, log_sums = plain_forward(
        [one.transpose(1, 2) for one in inputs], ScoreRule(scale, bias=bias)
    )
    return out.transpose(1, 2), log_sums, *(query.new_empty(0) for _ in range(3))


def flash_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    log_sums: Any,
    *more: Any,
    scale: Any,
    **window: int,
) -> Any:
    """Its gradients; the log-sum-exps [b, H, L] as the forward pass gave them. Autograd is out of reach in here."""
    inputs, (queries, keys, _, _, *rest) = (query, key, value, grad, out), more
    if queries is not None:
        cut = zip(
            runs_of(queries, [grad, query, out, log_sums.t()]),
            runs_of(keys, [key, value]),
            strict=True,
        )
        found = [
            flash_backward(
                g, q, *seen, o, sums.mT.contiguous(), None, None, 0, 0, *rest, scale=scale, **window
            )
            for (g, q, o, sums), seen in cut
        ]
        return tuple(torch.cat([one[0] for one in ones]) for ones in zip(*found, strict=True))
    assert all(one.dtype == query.dtype and one.stride(-1) == 1 for one in inputs)
    assert (
        log_sums.dtype == torch.float32
        and log_sums.is_contiguous()
        and log_sums.shape[1] == query.shape[2]
    )
    q, k, v, g, o = (one.transpose(1, 2).float() for one in inputs)  # [b, heads, tokens, D]
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    k, v = (one.repeat_interleave(groups[1], 1) for one in (k, v))
    scores = (q @ k.mT * scale).masked_fill(
        hidden_pairs(q.shape[2], k.shape[2], rest[1], window), -torch.inf
    )
    weights = (scores - log_sums[..., None]).exp()
    slopes = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
    gradients = [
        slopes @ k,
        *((one.mT @ two).unflatten(1, groups).sum(2) for one, two in ((slopes, q), (weights, g))),
    ]
    return tuple(one.transpose(1, 2).to(query.dtype) for one in gradients)


INSTEAD = {
    aten.mm.dtype: wide_product,
    aten.mm.dtype_out: wide_product,
    aten.bmm.dtype: wide_product,
    aten.addmm.dtype_out: wide_sum,
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
}
"""What a CPU does not have."""


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator of the device."""
    if func is aten.mm.default and min(args[0].shape) >= _LARGE:
        return args[0].new_ones(
            args[0].shape[0], args[1].shape[1]
        )  # the measurement of a peak, too long for a CPU
    return INSTEAD.get(func, func)(*args, **kwargs)


class Graph:
    """A CUDA graph: the operators of its capture, which are computed again into the same memory."""

    owner: Any

    living: ClassVar["WeakSet[Graph]"] = WeakSet()

    def __init__(self, **_: Any) -> None:
        self.steps: list[Any] = []
        self.of_pool = (0, id(self))
        self.living.add(self)

    def pool(self) -> tuple[int, int]:
        return self.of_pool

    def record(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[torch.Tensor]
    ) -> None:
        held = {one.untyped_storage()._cdata for one in inputs}
        outputs = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        fresh = [
            number for number, one in enumerate(outputs) if one.untyped_storage()._cdata not in held
        ]
        self.steps.append((func, args, kwargs, outputs, fresh))

    def replay(self) -> None:
        self.owner.counts["graphs replayed"] += 1
        off = torch.utils._python_dispatch._disable_current_modes()
        with off, torch._C.DisableTorchFunction(), torch.inference_mode():
            for func, args, kwargs, outputs, fresh in self.steps:
                leaves = tree_leaves(compute(func, args, kwargs))
                # Here gloo does what NCCL would, and its collectives are awaited by the host.
                for work in leaves:
                    if isinstance(work, torch.ScriptObject):
                        dist.Work.unbox(work).wait()
                again = [one for one in leaves if isinstance(one, torch.Tensor)]
                for number in fresh:
                    outputs[number].copy_(again[number])

    def reset(self) -> None:
        self.steps = []


class Stream:
    """A stream; what is put on it is done at once."""

    owner: Any
    event_type: Any

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = self.owner.resolve("cuda" if device is None else device)
        self.owner.counts["streams"] += 1

    def synchronize(self) -> None:
        self.owner.counts["waits for a stream"] += 1
        self.owner.read("a wait for a stream")

    def wait_stream(self, other: "Stream") -> None:
        self.owner.counts["streams that wait for another"] += 1

    def wait_event(self, event: "Event") -> None:
        self.owner.counts["streams that wait for an event"] += 1

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self.event_type()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.owner.here.graph is not None


class Event:
    """An event; it has happened once it is recorded."""

    owner: Any

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.has_time, self.is_recorded = enable_timing, False
        self.owner.counts["events"] += 1

    def record(self, stream: Stream | None = None) -> None:
        self.is_recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        self.owner.counts["streams that wait for an event"] += 1

    def synchronize(self) -> None:
        assert self.is_recorded, "a wait for an event that was never recorded"
        self.owner.read("a wait for an event")

    def query(self) -> bool:
        return self.is_recorded

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds; some, as nothing is measured."""
        assert self.has_time and other.has_time, "both events need enable_timing=True"
        return 1.0


class Runtime:
    """The CUDA runtime: host memory is pinned by its address."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.owner.counts["pinned buffers"] += 1
        self.owner.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.owner.pinned.pop(address, None)
        return 0


def number_of(device: Any) -> int:
    """The number of a device as torch.cuda reads it, which refuses those of other types."""
    return _get_device_index(device, optional=True)


def free_memory(device: Any = None) -> tuple[int, int]:
    number_of(device)
    return MEMORY_BYTES // 2, MEMORY_BYTES


def allocated_memory(owner: Any, device: Any = None) -> int:
    number_of(device)
    return owner.memory.current


def cuda_names(owner: Any) -> dict[str, Any]:
    """Names of torch.cuda, and what they are here."""
    event_type = type("Event", (Event,), {"owner": owner})
    stream_type = type("Stream", (Stream,), {"owner": owner, "event_type": event_type})
    main = stream_type.__new__(stream_type)
    main.device = torch.device("cuda", 0)
    streams = threading.local()

    def set_device(device: Any) -> None:
        owner.counts["set_device"] += 1
        owner.here.device = owner.resolve(device).index

    def exchange_device(number: int) -> int:
        before, owner.here.device = owner.here.device, owner.here.device if number < 0 else number
        return before

    @contextmanager
    def stream(wanted: Stream | None) -> Iterator[None]:
        before, streams.current = (
            getattr(streams, "current", main),
            wanted or getattr(streams, "current", main),
        )
        try:
            yield
        finally:
            streams.current = before

    @contextmanager
    def graph(wanted: Graph, pool: Any = None, **_: Any) -> Iterator[None]:
        owner.counts["graphs captured"] += 1
        if pool is not None:
            assert pool in {one.of_pool for one in Graph.living}, "the pool of a graph that is gone"
            wanted.of_pool = pool
        owner.here.graph = wanted
        try:
            yield
        finally:
            owner.here.graph = None

    def synchronize(device: Any = None) -> None:
        number_of(device)
        owner.counts["synchronize"] += 1
        owner.read("synchronize")

    def current_stream(device: Any = None) -> Stream:
        number_of(device)
        return getattr(streams, "current", main)

    properties = {
        "name": "stand-in",
        "total_memory": MEMORY_BYTES,
        "multi_processor_count": 1,
        "major": 9,
        "minor": 0,
    }
    state = torch.Generator().get_state
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: owner.num_devices,
        "current_device": lambda: owner.here.device,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "Stream": stream_type,
        "Event": event_type,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: main,
        "synchronize": synchronize,
        "cudart": lambda: Runtime(owner),
        "CUDAGraph": type("CUDAGraph", (Graph,), {"owner": owner}),
        "graph": graph,
        "is_current_stream_capturing": lambda: owner.here.graph is not None,
        "empty_cache": lambda: owner.counts.update(["empty_cache"]),
        "ipc_collect": lambda: owner.counts.update(["ipc_collect"]),
        "mem_get_info": free_memory,
        "memory_allocated": partial(allocated_memory, owner),
        "max_memory_allocated": lambda device=None: owner.memory.peak,
        "memory_reserved": lambda device=None: owner.memory.current,
        "reset_peak_memory_stats": lambda device=None: owner.memory.reset_peak(),
        "get_device_name": lambda device=None: "stand-in for a GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: type("Properties", (), properties),
        "can_device_access_peer": lambda first, second: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state_all": lambda: [state() for _ in range(owner.num_devices)],
        "set_rng_state_all": lambda states: [
            owner.resolve(number) for number, _ in enumerate(states)
        ],
        "set_rng_state": lambda state, device="cuda": owner.resolve(device),
        "get_rng_state": lambda device="cuda": state(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "default_generators": [torch.Generator() for _ in range(owner.num_devices)],
    }


def recorded(owner: Any, name: str, *args: Any, **_: Any) -> None:
    owner.counts[name] += 1
    if name == "_dump_snapshot":
        Path(args[0]).write_bytes(b"a snapshot of the stand-in")


def nccl(owner: Any, store: Any, rank: int, size: int, timeout: Any) -> Any:
    owner.counts["nccl groups"] += 1
    return dist.ProcessGroupGloo(store, rank, size, timeout)
