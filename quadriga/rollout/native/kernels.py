# SPDX-License-Identifier: Apache-2.0
"""The loops of `kernels.c`, compiled by this machine's C compiler on first use.

    kernels.c ── cc ──> ~/.cache/quadriga/kernels-<hash of source, compiler, CPU>.so ──> Kernels

The loops run on torch's threads: their OpenMP symbols are resolved from the library that torch has
loaded. Without a compiler or AVX-512, torch's operators do the same work, and `about_kernels` gives
the reason.

Legend: R rows, D inputs, hidden or head size, O outputs, H heads, F width of an MLP, K key-value
heads, G query heads of each key-value head, P prefixes, S tokens of the longest prefix, C slots of
the response cache, T tokens of a response that the cache has room for.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadriga.models.attention import PLAIN, AttentionOptions
from quadriga.observe.machine import cpu_limit

Tensors = Sequence[Tensor]

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O2", "-march=native", "-fPIC", "-fopenmp")
_COMPILERS = ("gcc", "cc")

# Sizes must be multiples of these; see kernels.c.
_COLUMNS = 4  # outputs of a product
_PAIR = 32  # bfloat16 numbers of a vector: two vectors of float32
_LANES = 16  # float32 numbers of a vector


class _UnavailableError(Exception):
    """The reason why there are no compiled loops, worded to follow "no compiled loops: "."""


_LONG = ctypes.c_long
_INT = ctypes.c_int
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of a structure with the same type, as pairs of name and type for ctypes."""
    return [(name, kind) for name in names]


# These structures have the same fields as `product` and `decode` of kernels.c, which documents
# them, in the same order.
class _Product(ctypes.Structure):
    _fields_ = (
        *_fields(_LONG, "num_rows", "size", "first", "num_outputs"),
        *_fields(_INT, "is_half", "num_threads"),
        ("room", _POINTER),
    )


class _Decode(ctypes.Structure):
    _fields_ = (
        *_fields(_LONG, "num_rows", "num_key_heads", "group", "size", "prefix_room", "own_room"),
        *_fields(_LONG, "query_stride", "key_stride", "value_stride", "window"),
        *_fields(_POINTER, "prefix_of", "prefix_length", "num_written", "sinks"),
        *_fields(_FLOAT, "scale", "softcap"),
        *_fields(_INT, "is_half", "num_threads"),
    )


class KeysAndValues(NamedTuple):
    """KV cache of one layer: of prefixes, [P, K, S, D], or of responses, [C, K, T, D]."""

    keys: Tensor
    values: Tensor


class SlotPlaces(NamedTuple):
    """Places of the cached tokens of each slot, [R] int64 each.

    Attributes:
        prefix_of: index of the slot's prefix in the prefix cache.
        prefix_length: number of tokens of the prefix.
        num_written: number of response tokens that are in the response cache before the step.
    """

    prefix_of: Tensor
    prefix_length: Tensor
    num_written: Tensor


class Kernels:
    """The compiled loops of `kernels.c`.

    Args:
        library: the loaded shared library.
        compiler: first line of the compiler's `--version`, for `about_kernels`.
    """

    def __init__(self, library: ctypes.CDLL, compiler: str) -> None:
        self.compiler = compiler
        # Without these types, ctypes would pass sizes as C's int and cut addresses to 32 bits.
        argument_types = {
            "multiply": (ctypes.POINTER(_Product), *[_POINTER] * 4, _LONG),
            "attend": (ctypes.POINTER(_Decode), *[_POINTER] * 8),
            "normalize": (*[_POINTER] * 3, *[_LONG] * 2, _FLOAT, _INT, _INT),
            "rotate": (*[_POINTER] * 3, *[_LONG] * 4, _INT, _INT),
            "gate": (*[_POINTER] * 2, *[_LONG] * 2, _INT, _INT),
        }
        self._loops = {name: getattr(library, name) for name in argument_types}
        for name, loop in self._loops.items():
            loop.argtypes = argument_types[name]
            loop.restype = None

    @staticmethod
    def can_multiply(weight: Tensor) -> bool:
        """Whether `multiply` accepts this weight, [O, D]."""
        if weight.shape[0] % _COLUMNS or weight.shape[1] % _PAIR:
            return False
        is_on_cpu = weight.device.type == "cpu"
        return is_on_cpu and weight.dtype == torch.bfloat16 and weight.is_contiguous()

    @staticmethod
    def can_attend(head_size: int) -> bool:
        """Whether `attend` accepts heads of this size."""
        return head_size % _LANES == 0

    @staticmethod
    def can_compute(*sizes: int) -> bool:
        """Whether `normalize`, `rotate` and `gate` accept these sizes of rows and heads."""
        return all(size % _PAIR == 0 for size in sizes)

    def multiply(
        self, states: Tensor, weights: Tensors, biases: Tensors | None, dtype: torch.dtype
    ) -> Tensor:
        """Multiply a few rows with several weights, with the outputs side by side.

        Args:
            states: [R, D] bfloat16, contiguous.
            weights: [O, D] bfloat16 each; see `can_multiply`.
            biases: [O] bfloat16 for each weight, or None.
            dtype: dtype of the result, bfloat16 or float32.

        Returns:
            [R, sum of O].
        """
        num_rows, size = states.shape
        _require_layout(states, torch.bfloat16, num_rows, size)
        out = torch.empty(num_rows, sum(len(weight) for weight in weights), dtype=dtype)
        room = torch.empty(num_rows, size)  # scratch memory, in which the loop reorders the rows

        product = _Product(
            num_rows=num_rows,
            size=size,
            num_outputs=out.shape[1],
            is_half=dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
            room=room.data_ptr(),
        )
        multiply = self._loops["multiply"]
        for number, weight in enumerate(weights):
            width = len(weight)
            _require_layout(weight, torch.bfloat16, width, size)
            bias = None
            if biases is not None:
                _require_layout(biases[number], torch.bfloat16, width)
                bias = biases[number].data_ptr()
            multiply(product, out.data_ptr(), states.data_ptr(), weight.data_ptr(), bias, width)
            # The next weight's outputs begin behind these.
            product.first += width
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        responses: KeysAndValues,
        prefixes: KeysAndValues,
        places: SlotPlaces,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Compute attention of one new token per slot over the slot's prefix and response.

        The new token's key and value are first written to `responses`, where slot r is row r.

        Args:
            query: [R, K * G, D] bfloat16 or float32.
            key: [R, K, D] of the same dtype.
            value: [R, K, D] of the same dtype.
            scale: factor of the scores.
            responses: KV cache of the responses, float32.
            prefixes: KV cache of the prefixes, float32.
            places: where the tokens of each slot are.
            options: window, softcap and sinks of the layer.

        Returns:
            [R, K * G, D] in the dtype of `query`.
        """
        num_rows, num_heads, size = query.shape
        num_key_heads = key.shape[1]
        # The loop takes a stride between rows, so views of a joint projection need no copy.
        query = with_contiguous_rows(query)
        key = with_contiguous_rows(key)
        value = with_contiguous_rows(value)
        for part in (responses, prefixes):
            room = part.keys.shape[2]
            for states in part:
                _require_layout(states, torch.float32, len(states), num_key_heads, room, size)
        for tensor in places:
            _require_layout(tensor, torch.int64, num_rows)
        out = torch.empty(num_rows, num_heads, size, dtype=query.dtype)

        # `sinks` stays referenced until the loop has returned: the structure holds its address.
        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        is_half, num_threads = _dtype_and_threads(query)
        step = _Decode(
            num_rows=num_rows,
            num_key_heads=num_key_heads,
            group=num_heads // num_key_heads,
            size=size,
            prefix_room=prefixes.keys.shape[2],
            own_room=responses.keys.shape[2],
            query_stride=query.stride(0),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            window=options.window or 0,
            prefix_of=places.prefix_of.data_ptr(),
            prefix_length=places.prefix_length.data_ptr(),
            num_written=places.num_written.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=scale,
            softcap=options.softcap or 0.0,
            is_half=is_half,
            num_threads=num_threads,
        )
        tensors = (out, query, key, value, *responses, *prefixes)
        self._loops["attend"](step, *(tensor.data_ptr() for tensor in tensors))
        return out

    def normalize(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute the root-mean-square norm over the last dimension, times `weight`.

        Args:
            states: [..., D] bfloat16 or float32.
            weight: [D] in the same dtype.
            epsilon: added to the mean square.

        Returns:
            [..., D] in the same dtype.
        """
        states = states.contiguous()
        out = torch.empty_like(states)
        size = states.shape[-1]
        _require_layout(weight, states.dtype, size)
        num_rows = states.numel() // size
        self._loops["normalize"](
            out.data_ptr(),
            states.data_ptr(),
            weight.data_ptr(),
            num_rows,
            size,
            epsilon,
            *_dtype_and_threads(states),
        )
        return out

    def add_and_normalize(
        self, states: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Add two tensors, and compute the root-mean-square norm of the sum, times `weight`.

        Args:
            states: [..., D] bfloat16 or float32.
            added: [..., D] in the same dtype.
            weight: [D] in the same dtype.
            epsilon: added to the mean square.

        Returns:
            The sum and its norm, [..., D] each.
        """
        states = states + added
        return states, self.normalize(states, weight, epsilon)

    def rotate(self, states: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary positions to the first heads, in place.

        All tensors are contiguous and of one dtype, bfloat16 or float32.

        Args:
            states: [..., H, D].
            num_rotated: number of heads to rotate.
            cos: [..., D].
            sin: [..., D].

        Returns:
            `states`.
        """
        num_heads, size = states.shape[-2:]
        _require_layout(states, states.dtype, *states.shape)
        for tensor in (cos, sin):
            _require_layout(tensor, states.dtype, *states.shape[:-2], size)
        num_rows = states.numel() // (num_heads * size)
        self._loops["rotate"](
            states.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_rows,
            num_heads,
            num_rotated,
            size,
            *_dtype_and_threads(states),
        )
        return states

    def gate(self, states: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2 * F] bfloat16 or float32, contiguous, gate first -> [..., F]."""
        _require_layout(states, states.dtype, *states.shape)
        width = states.shape[-1] // 2
        out = torch.empty(*states.shape[:-1], width, dtype=states.dtype)
        num_rows = out.numel() // width
        self._loops["gate"](
            out.data_ptr(), states.data_ptr(), num_rows, width, *_dtype_and_threads(states)
        )
        return out


def with_contiguous_rows(states: Tensor) -> Tensor:
    """Return a tensor [R, H, D] in which each row [H, D] is contiguous, copied if necessary.

    Rows may have any distance from each other: a kernel gets it as a stride.
    """
    is_contiguous = states.stride()[1:] == (states.shape[2], 1)
    return states if is_contiguous else states.contiguous()


def _require_layout(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Assert that a tensor is contiguous and has a dtype and shape: a loop only gets an address."""
    actual = (tensor.dtype, tensor.shape, tensor.is_contiguous())
    expected = (dtype, shape, True)
    assert actual == expected, f"got {actual}, expected {expected}"


def _dtype_and_threads(states: Tensor) -> tuple[bool, int]:
    """Last two arguments of a loop: whether the tensor is bfloat16, and the number of threads."""
    return states.dtype == torch.bfloat16, torch.get_num_threads()


def kernels() -> Kernels | None:
    """Return the compiled loops; None if this machine cannot have them (see `about_kernels`)."""
    return _load_once()[0]


def about_kernels() -> str:
    """Describe this machine's loops, or the reason why it has none, to be printed."""
    return _load_once()[1]


@cache
def _load_once() -> tuple[Kernels | None, str]:
    """Load the compiled loops, once per process.

    Returns:
        The loops, or None if this machine cannot have them, and the text of `about_kernels`.
    """
    try:
        loops = _load()
    except _UnavailableError as error:
        return None, f"no compiled loops: {error}"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = f"compiling, storing or loading them failed: {error}"
        return None, f"no compiled loops: {reason} (XDG_CACHE_HOME sets the folder)"
    return loops, f"loops compiled with {loops.compiler}"


def _load() -> Kernels:
    """Load the library from the cache; compile it first if it is missing or broken.

    Raises:
        _UnavailableError: the CPU, the compiler or the folder of the cache is not suitable, or the
            compiler failed.
        OSError, RuntimeError: the library cannot be stored or loaded, or there is no home
            directory.
    """
    limit = cpu_limit()  # such as "ATEN_CPU_CAPABILITY=avx2"; "" without a limit
    if limit:
        raise _UnavailableError(f"{limit} excludes AVX-512")
    if not torch.cpu._is_avx512_supported():
        raise _UnavailableError("this processor has no AVX-512")
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise _UnavailableError("no C compiler is installed (gcc would make generation faster)")

    # The file's name changes with everything that the compiled code depends on.
    version = _run_command(compiler, "--version").partition("\n")[0]
    cpu_lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu_flags = next((line for line in cpu_lines if line.startswith("flags")), "")
    source = _SOURCE.read_text(encoding="utf-8")
    depends_on = "\n".join((source, *_FLAGS, version, cpu_flags))
    digest = hashlib.sha256(depends_on.encode()).hexdigest()[:16]

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quadriga"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Code from this folder runs in our process, so nobody else may be able to write to it.
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        fix = "chmod go-w, or another XDG_CACHE_HOME"
        raise _UnavailableError(f"other users can write to {folder} ({fix})")

    library = folder / f"kernels-{digest}.so"
    try:
        # Compiling takes seconds, so a library of an earlier run is used if it loads.
        return Kernels(ctypes.CDLL(str(library)), version)
    except OSError:  # it is missing or broken
        _compile(compiler, library)
    return Kernels(ctypes.CDLL(str(library)), version)


def _compile(compiler: str, library: Path) -> None:
    """Compile the library. Several processes may do so at once: each moves a finished file there.

    Args:
        compiler: path of the compiler.
        library: path of the library to write.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = Path(folder) / "kernels.o"
        linked = Path(folder) / "kernels.so"
        _run_command(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(compiled))
        # Linked without -fopenmp: a second OpenMP library would compete with torch's threads.
        _run_command(compiler, "-shared", str(compiled), "-o", str(linked))
        # Load it once, because a library that cannot be loaded must not get into the cache.
        ctypes.CDLL(str(linked))
        os.replace(linked, library)


def _run_command(*command: str) -> str:
    """Run a command, and return its standard output. Raises _UnavailableError if it fails."""
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        stderr = done.stderr.strip()[-500:]
        raise _UnavailableError(f"{' '.join(command)} failed: {stderr}")
    return done.stdout
