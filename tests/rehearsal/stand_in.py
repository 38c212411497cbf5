# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA devices: tensors "on cuda" lie in host memory, and what a GPU would refuse or wait for is noted.

    TorchFunctionMode    calls from Python: a `cuda` device becomes "cpu" for torch, and the result is marked as on cuda
    TorchDispatchMode    operators, also those of a backward pass: marks outputs by inputs, and looks at what is mixed
    torch.cuda.*         streams, events, the allocator, the current device, graphs: counted, without an effect

The mark of a tensor is on its storage, so views and parameters have it too. What is found:

    `findings`     mistakes: operands on two devices; an asynchronous copy from memory that is not pinned; a tensor on a
                   device that is not the thread's current one; the result of an asynchronous copy that is read before
                   anything waited for it
    `host_reads`   places where the host waits for a result of the device; inside `no_host_reads` they are mistakes

In a capture of a graph both, and copies that are not asynchronous, are errors, as on a GPU.

`memory` counts the bytes of live storages (memory.py).

What it does not show: that a kernel exists for a dtype, is right or fast on a GPU, or how much memory it takes; races
of streams, which run in the order of the program here. Different dtypes in a product are errors on a CPU, too.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.rehearsal.devices import Graph, compute, cuda_names, nccl, recorded
from tests.rehearsal.memory import DeviceMemory

PACKAGE = str(Path(__file__).parents[2] / "quadriga")
aten = torch.ops.aten
# Operators for which torch takes operands on two devices.
_COPIES = {
    aten.copy_.default,
    aten._foreach_copy_.default,
    aten._to_copy.default,
    aten._foreach_copy.default,
}
_INDEXED = {
    "aten::index",
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}
# The shape of their result, or the result itself, is known once the device has computed it.
_READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim",
    "aten::_unique2", "aten::unique_consecutive", "aten::is_nonzero",
}  # fmt: skip
# Functions that call the engine of backward passes: torch's, and Megatron-core's.
_BACKWARD_CALLS = {"_engine_run_backward", "custom_backward"}
_HOST = torch.device("cpu")


class _Thread(threading.local):
    device = 0
    graph: "Graph | None" = None
    forbids_reads = ""


class StandIn:
    """`num_devices` devices, installed with `installed`. `counts` is what happened, by name; `file` gets findings."""

    installed_one: "StandIn | None" = None

    def __init__(self, num_devices: int = 1, file: Path | None = None) -> None:
        self.num_devices, self.file = num_devices, file
        self.here = _Thread()
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []
        self.host_reads: list[str] = []
        self.num_waits = 0
        self.memory = DeviceMemory()
        self.pinned: dict[int, int] = {}  # sizes of registered host memory, by address
        self.nccl_groups: set[str] = set()  # names of groups that gloo plays for NCCL
        self.modes = (_Functions(self), _Operators(self))

    # ---- marks ----------------------------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor is, as the program sees it."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != "cpu" or tensor.is_mkldnn:  # packed for a CPU, without a storage
            return tensor.device
        return getattr(storage_of(tensor), "mark", _HOST)

    def mark(self, tensors: Any, device: torch.device) -> None:
        """Tensors are on this device from here on."""
        for tensor in tree_leaves(tensors):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type == "cpu"
                and not tensor.is_mkldnn
            ):
                storage = storage_of(getattr(tensor, "_local_tensor", tensor))
                storage.mark = device
                if device.type == "cuda":
                    self.memory.add(storage)

    def resolve(self, device: Any) -> torch.device | None:
        """A device that a call names; None: it names none. `cuda` is the thread's current one."""
        if device is None:
            return None
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        index = self.here.device if device.index is None else device.index
        if index >= self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        return torch.device("cuda", index)

    # ---- what is found --------------------------------------------------------------------------

    def find(self, what: str) -> None:
        """Note a mistake; from a worker of Ray, which may be killed at any time, in the folder of the run."""
        self.findings.append(f"{what}, at {place()}")
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{self.findings[-1]}\n")

    def refuse_in_capture(self, what: str) -> None:
        if self.here.graph is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what}, at {place()})"
            )

    def read(self, what: str) -> None:
        """The host waits for the device."""
        self.num_waits += 1
        self.refuse_in_capture(what)
        self.host_reads.append(f"{what} at {place()}")
        if self.here.forbids_reads:
            self.find(f"{what} makes the host wait in {self.here.forbids_reads}")

    @contextmanager
    def no_host_reads(self, where: str) -> Iterator[None]:
        """A read by the host inside the block is a finding."""
        before, self.here.forbids_reads = self.here.forbids_reads, where
        try:
            yield
        finally:
            self.here.forbids_reads = before

    def copied(self, source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
        """One tensor was copied to the memory of another."""
        kinds = self.device_of(source).type, self.device_of(target).type
        if kinds == ("cpu", "cuda"):
            self.counts["copies to the device"] += 1
            if non_blocking and not is_pinned(source):
                self.find("an asynchronous copy to the device from memory that is not pinned")
            elif non_blocking and self.here.graph is None:
                self.counts["asynchronous copies"] += 1
            elif source.numel():
                self.refuse_in_capture("a copy to the device")
        elif kinds == ("cuda", "cpu"):
            self.counts["copies to the host"] += 1
            if not non_blocking:
                self.read("a copy to the host")
            elif not is_pinned(target):
                self.find("an asynchronous copy to memory that is not pinned")
            else:
                self.counts["asynchronous copies"] += 1
                storage_of(target).pending = self.num_waits

    def looked_at(self, tensor: torch.Tensor, how: str) -> None:
        """The host reads the numbers of a tensor."""
        if self.device_of(tensor).type == "cuda":
            self.read(how)
        elif getattr(storage_of(tensor), "pending", -1) == self.num_waits:
            self.find(f"{how} of an asynchronous copy that nothing waited for")

    # ---- installing -----------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The modes act in this thread."""
        with self.modes[0], self.modes[1]:
            yield

    @contextmanager
    def installed(self) -> Iterator["StandIn"]:
        """torch has the devices, in every thread that starts meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            StandIn.installed_one = self
            with self.entered():
                yield self

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        run = threading.Thread.run

        def run_entered(thread: threading.Thread) -> None:
            with self.entered():
                run(thread)

        patch.setattr(threading.Thread, "run", run_entered)
        for name, value in cuda_names(self).items():
            patch.setattr(torch.cuda, name, value)
        for name in ("_record_memory_history", "_dump_snapshot"):
            patch.setattr(torch.cuda.memory, name, partial(recorded, self, name))
        for module, name in ((torch.cuda.profiler, "start"), (torch.cuda.profiler, "stop")):
            patch.setattr(module, name, partial(recorded, self, f"profiler.{name}"))
        patch.setattr(torch.cuda.nvtx, "range", self._range)
        for name in (
            "mem_get_info",
            "memory_allocated",
            "max_memory_allocated",
            "reset_peak_memory_stats",
            "empty_cache",
        ):
            patch.setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
        patch.setattr(torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(
            torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
        )
        patch.setattr(torch.accelerator, "current_stream", lambda *_: torch.cuda.current_stream())
        patch.setattr(torch.accelerator, "current_device_index", lambda: self.here.device)
        patch.setattr(torch.accelerator, "device_count", lambda: self.num_devices)
        storage = torch.UntypedStorage
        patch.setattr(
            storage, "device", property(lambda one: getattr(one, "mark", _HOST)), raising=False
        )
        self._patch_handles(patch)
        patch.setattr(storage, "resize_", self._resizer(storage.resize_))
        run_backward = torch.autograd._engine_run_backward

        def run_backward_entered(*args: Any, **options: Any) -> Any:
            with self.modes[
                0
            ]:  # its own call of torch is over; the Python functions of a backward pass make more
                return run_backward(*args, **options)

        patch.setattr(torch.autograd, "_engine_run_backward", run_backward_entered)
        hooks = torch.autograd.graph.saved_tensors_hooks
        begin = hooks.__init__

        def entered_hooks(self_: Any, pack: Callable, unpack: Callable) -> None:
            begin(self_, partial(self._hook, pack), partial(self._hook, unpack))

        patch.setattr(hooks, "__init__", entered_hooks)
        self._patch_groups(patch)

    def _patch_groups(self, patch: pytest.MonkeyPatch) -> None:
        """Groups of NCCL, which gloo plays."""
        start = dist.init_process_group

        def start_group(backend: str | None = None, **options: Any) -> None:
            if backend == "nccl":
                self.counts["nccl groups"] += 1
                device = options.pop("device_id", None)
                if device is not None and device != torch.device("cuda", self.here.device):
                    self.find(
                        f"a group of NCCL on {device} beside the current device {self.here.device}"
                    )
            start("gloo" if backend == "nccl" else backend, **options)
            if backend == "nccl":
                self.nccl_groups.add(dist.group.WORLD.group_name)

        make_group, backend_of = dist.new_group, dist.get_backend

        def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
            is_nccl = backend is None and dist.group.WORLD.group_name in self.nccl_groups
            group = make_group(*args, backend=backend, **options)
            if is_nccl and isinstance(group, dist.ProcessGroup):
                self.nccl_groups.add(group.group_name)
            return group

        def get_backend(group: dist.ProcessGroup | None = None) -> str:
            name = (group or dist.group.WORLD).group_name
            return "nccl" if name in self.nccl_groups else backend_of(group)

        patch.setattr(dist, "init_process_group", start_group)
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(dist, "get_backend", get_backend)
        patch.setattr(dist, "ProcessGroupNCCL", partial(nccl, self), raising=False)

    def _patch_handles(self, patch: pytest.MonkeyPatch) -> None:
        """Handles of memory for other processes; here both sides are this process."""
        storage = torch.UntypedStorage
        handles: list[torch.UntypedStorage] = []

        def share(one: torch.UntypedStorage) -> tuple[Any, ...]:
            if one.device.type != "cuda":
                raise RuntimeError(f"_share_cuda_: only available on CUDA, got {one.device}")
            handles.append(one)
            return one.device.index, len(handles) - 1, one.nbytes(), 0, b"", 0, b"", False

        patch.setattr(storage, "_share_cuda_", share, raising=False)
        patch.setattr(
            storage,
            "_new_shared_cuda",
            lambda device, number, *more: handles[number],
            raising=False,
        )

    def _resizer(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """`UntypedStorage.resize_`, counted: FSDP frees what it has gathered by it."""

        def resize_counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if getattr(storage, "mark", _HOST).type == "cuda":
                self.memory.add(storage)
            return storage

        return resize_counted

    def _range(self, name: str) -> Any:
        self.counts["nvtx.range"] += 1
        return nullcontext()

    def _hook(self, hook: Callable[[Any], Any], value: Any) -> Any:
        """torch calls it from an operator, where the first mode does not act."""
        with self.modes[0]:
            return hook(value)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def is_pinned(tensor: torch.Tensor) -> bool:
    storage = storage_of(tensor)
    if getattr(storage, "is_pinned_here", False):
        return True
    owner = StandIn.installed_one
    return owner is not None and storage.data_ptr() in owner.pinned


def place() -> str:
    """The innermost line of the package, or of the test, that is being run."""
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) or (file != __file__ and "/tests/" in file):
            return f"{file.partition('/quadriga/')[2] or file}:{line}"
    return "a line outside of the package"


def fits_all_devices(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, or was computed from, zeros in the place of missing gradients."""
    if tensor.device.type != "cpu" or tensor.is_mkldnn:
        return False
    return getattr(storage_of(tensor), "fits_all_devices", False)


def is_from_autograd() -> bool:
    """Whether the engine of a backward pass calls an operator, and no function in Python."""
    for frame, _ in walk_stack(None):
        code = frame.f_code
        # torch._dynamo calls the modes.
        if code.co_filename != __file__ and code.co_name not in ("_fn", "inner"):
            return code.co_name in _BACKWARD_CALLS
    return False


class _Functions(TorchFunctionMode):
    """Calls of torch from Python."""

    def __init__(self, owner: StandIn) -> None:
        super().__init__()
        self.owner, tensor = owner, torch.Tensor
        self.special: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: owner.device_of,
            tensor.is_cuda.__get__: lambda one: owner.device_of(one).type == "cuda",
            tensor.is_cpu.__get__: lambda one: owner.device_of(one).type == "cpu",
            tensor.get_device: lambda one: (
                owner.device_of(one).index if owner.device_of(one).type == "cuda" else -1
            ),
            tensor.is_pinned: lambda one, *_: is_pinned(one),
            tensor.pin_memory: self._pin,
            tensor.to: self._to,
            tensor.cuda: lambda one, device="cuda", non_blocking=False, **_: self._move(
                one, device, non_blocking
            ),
            tensor.cpu: lambda one, **_: self._move(one, "cpu", False),
            tensor.tolist: lambda one: self._look(one, tensor.tolist),
            tensor.numpy: self._numpy,
            tensor.__array__: lambda one, dtype=None: self._numpy(one).astype(dtype, copy=False),
            tensor.record_stream: lambda one, stream: owner.counts.update(
                ["tensors kept for a stream"]
            ),
            torch.as_tensor: lambda data, dtype=None, device=None: self._as_tensor(
                data, dtype, device
            ),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (special := self.special.get(func)) is not None:
            return special(*args, **kwargs)
        device = self.owner.resolve(kwargs["device"]) if kwargs.get("device") is not None else None
        if device is not None and device.type == "cuda":
            kwargs["device"] = _HOST
        pins = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if device is not None and device.type in ("cuda", "cpu"):
            self.owner.mark(result, device)
            if device.type == "cuda" and func is torch.tensor and result.numel():
                self.owner.counts["copies to the device"] += 1
                self.owner.refuse_in_capture("a tensor from a list")
        if pins:
            self.owner.counts["pinned buffers"] += 1
            storage_of(result).is_pinned_here = True
        return result

    def _pin(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if is_pinned(tensor):
            return tensor
        if self.owner.device_of(tensor).type == "cuda":
            raise RuntimeError("cannot pin a tensor on cuda: only dense CPU tensors can be pinned")
        self.owner.counts["pinned buffers"] += 1
        result = tensor.clone()
        storage_of(result).is_pinned_here = True
        return result

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (self.owner.device_of(args[0]), args[0].dtype, *args[1:])
        given = [one for one in args if isinstance(one, torch.dtype)]
        dtype = kwargs.get("dtype") or (given[0] if given else tensor.dtype)
        places = [
            one
            for one in args[:1]
            if isinstance(one, (str, int, torch.device)) and not isinstance(one, bool)
        ]
        device = self.owner.resolve(kwargs.get("device", places[0] if places else None))
        flags = [one for one in args if isinstance(one, bool)]
        non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
        copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
        if "memory_format" in kwargs:
            tensor = tensor.contiguous(memory_format=kwargs["memory_format"])
        if device is None or device == self.owner.device_of(tensor):
            return tensor.to(dtype, copy=copy)
        return self._move(tensor.to(dtype), device, non_blocking)

    def _move(self, tensor: torch.Tensor, device: Any, non_blocking: bool) -> torch.Tensor:
        wanted = self.owner.resolve(device)
        if wanted == self.owner.device_of(tensor):
            return tensor
        if wanted.type == "meta":
            return tensor.to("meta")
        result = tensor.clone()
        self.owner.mark(result, wanted)
        if wanted.type == "cpu" and non_blocking:
            storage_of(result).is_pinned_here = True  # torch takes pinned memory for it
        if tensor.device.type != "meta":
            self.owner.copied(tensor, result, non_blocking=non_blocking)
        return result

    def _look(self, tensor: torch.Tensor, func: Callable[..., Any]) -> Any:
        self.owner.looked_at(tensor, func.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return func(tensor)

    def _numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.owner.device_of(tensor).type == "cuda":
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first"
            )
        self.owner.looked_at(tensor, "numpy")
        return tensor.numpy(*args, **kwargs)

    def _as_tensor(self, data: Any, dtype: Any, device: Any) -> torch.Tensor:
        result = torch.as_tensor(data, dtype=dtype)
        return result if device is None else self._to(result, device)


class _Operators(TorchDispatchMode):
    """Operators of torch, from Python or not."""

    def __init__(self, owner: StandIn) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        owner = self.owner
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        places = {owner.device_of(one) for one in tensors}
        on_device = {device for device in places if device.type == "cuda"}
        name = func._schema.name
        if on_device:
            owner.counts["operators"] += 1
            self._check(func, name, tensors, on_device, args, kwargs)
        result = compute(func, args, kwargs)
        if func in (aten.copy_.default, aten._foreach_copy_.default):
            non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            targets, sources = ([one] if isinstance(one, torch.Tensor) else one for one in args[:2])
            for target, source in zip(targets, sources, strict=True):
                owner.copied(source, target, non_blocking=non_blocking)
        else:
            self._place(result, tensors, on_device)
        if owner.here.graph is not None:
            if name.startswith("c10d::"):
                self._require_nccl(args)
            owner.here.graph.record(func, args, kwargs, result, tensors)
        return result

    def _require_nccl(self, args: Any) -> None:
        """Refuse a collective of gloo in a capture: the host does it, so a replay would leave it out."""
        for one in tree_leaves(args):
            if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
                name = dist.ProcessGroup.unbox(one).group_name
                if name not in self.owner.nccl_groups:
                    self.owner.refuse_in_capture("a collective of gloo")

    def _place(
        self, result: Any, tensors: list[torch.Tensor], on_device: set[torch.device]
    ) -> None:
        """Mark the tensors of a result, by the operands and their devices."""
        fresh = []
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu" and not one.is_mkldnn:
                fresh.append(one)
        if on_device:
            for one in fresh:
                if not hasattr(storage_of(one), "mark"):
                    self.owner.mark(one, next(iter(on_device)))
        elif all(map(fits_all_devices, tensors)) and (tensors or is_from_autograd()):
            # torch's engine puts zeros in the place of missing gradients, on the device of others.
            for one in fresh:
                storage_of(one).fits_all_devices = True

    def _check(
        self,
        func: Any,
        name: str,
        tensors: list[torch.Tensor],
        on_device: set[torch.device],
        args: Any,
        kwargs: Any,
    ) -> None:
        owner = self.owner
        if func not in _COPIES:
            # A number may lie on the host, and so may indices.
            others = [
                one
                for one in tensors
                if owner.device_of(one).type == "cpu"
                and one.dim() > 0
                and not fits_all_devices(one)
            ]
            if name in _INDEXED:
                others = others if owner.device_of(args[0]).type == "cpu" else []
            if others or len(on_device) > 1:
                where = ", ".join(sorted(str(owner.device_of(one)) for one in tensors))
                owner.find(f"{name} with operands on {where}")
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found {where} in {name}"
                )
        if any(device.index != owner.here.device for device in on_device):
            owner.find(
                f"{name} on {min(map(str, on_device))} while the current device is {owner.here.device}"
            )
        indices = args[1] if name in _INDEXED else ()
        has_mask = any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices
        )
        counts = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in _READS or has_mask or counts:
            owner.read(name.removeprefix("aten::"))
