# SPDX-License-Identifier: Apache-2.0
"""The loops of `kernels.c`, compiled by this machine's C compiler at first use.

    kernels.c ── cc, for this processor ──> ~/.cache/quadriga/kernels-<source, compiler, processor>.so ──> Kernels

They run on torch's threads: their OpenMP symbols are resolved from the library that torch has loaded. Without a
compiler or AVX-512 torch's operators do the same work, and `about_kernels` says why.

Legend: R rows, D inputs, hidden or head size, O outputs, H heads, F width of an MLP, K key-value heads, G query heads
of each, P prefixes, S tokens of the longest, C slots of the response cache, T tokens of a response that
it has room for.
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
from typing import NamedTuple

import torch
from torch import Tensor

from quadriga.models.attention import PLAIN, AttentionOptions

Tensors = Sequence[Tensor]

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O2", "-march=native", "-fPIC", "-fopenmp")
_COMPILERS = ("gcc", "cc")
_COLUMNS, _PAIR, _LANES = 4, 32, 16  # what sizes must be multiples of; see kernels.c


class _UnavailableError(Exception):
    """Why there are no kernels, in words that follow "no compiled loops, for"."""


# The two structures have the fields of those in kernels.c, in the same order.
class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("num_rows", "size", "first", "num_outputs")),
        *((name, ctypes.c_int) for name in ("is_half", "num_threads")),
        ("room", ctypes.c_void_p),
    )


class _Decode(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("num_rows", "num_key_heads", "group", "size")),
        *((name, ctypes.c_long) for name in ("prefix_room", "own_room")),
        *(
            (name, ctypes.c_long)
            for name in ("query_stride", "key_stride", "value_stride", "window")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("prefix_of", "prefix_length", "num_written", "sinks")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int) for name in ("is_half", "num_threads")),
    )


class KeysAndValues(NamedTuple):
    """Of one layer, in float32: those of prefixes, [P, K, S, D], or of responses, [C, K, T, D]."""

    keys: Tensor
    values: Tensor


class SlotPlaces(NamedTuple):
    """Where the tokens of each slot are; [R] int64 each."""

    prefix_of: Tensor
    prefix_length: Tensor
    num_written: Tensor


class Kernels:
    """The compiled loops of `kernels.c`."""

    def __init__(self, library: ctypes.CDLL, compiler: str) -> None:
        self.compiler = compiler
        pointer, size, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        takes = {
            "multiply": (ctypes.POINTER(_Product), *[pointer] * 4, size),
            "attend": (ctypes.POINTER(_Decode), *[pointer] * 8),
            "normalize": (*[pointer] * 3, size, size, ctypes.c_float, number, number),
            "rotate": (*[pointer] * 3, *[size] * 4, number, number),
            "gate": (pointer, pointer, size, size, number, number),
        }
        self._loops = {name: getattr(library, name) for name in takes}
        for name, types in takes.items():
            self._loops[name].argtypes, self._loops[name].restype = types, None

    @staticmethod
    def can_multiply(weight: Tensor) -> bool:
        """Whether `multiply` takes this weight, [O, D]."""
        fits = weight.shape[0] % _COLUMNS == 0 and weight.shape[1] % _PAIR == 0
        return (
            fits
            and weight.dtype == torch.bfloat16
            and weight.device.type == "cpu"
            and weight.is_contiguous()
        )

    @staticmethod
    def can_attend(head_size: int) -> bool:
        """Whether `attend` takes heads of this size."""
        return head_size % _LANES == 0

    @staticmethod
    def can_compute(*sizes: int) -> bool:
        """Whether `normalize`, `rotate` and `gate` take hidden sizes, head sizes and widths like these."""
        return all(size % _PAIR == 0 for size in sizes)

    def multiply(
        self, states: Tensor, weights: Tensors, biases: Tensors | None, dtype: torch.dtype
    ) -> Tensor:
        """Few rows [R, D] bfloat16 times weights [O, D], plus biases [O], all bfloat16 and contiguous: [R, sum of O].

        For the weights see `can_multiply`. The result is bfloat16 or float32.
        """
        num_rows, size = states.shape
        _require(states, torch.bfloat16, num_rows, size)
        out = torch.empty(num_rows, sum(len(weight) for weight in weights), dtype=dtype)
        room = torch.empty(num_rows, size)
        product = _Product(
            num_rows, size, 0, out.shape[1], dtype == torch.bfloat16, torch.get_num_threads()
        )
        product.room = room.data_ptr()
        multiply = self._loops["multiply"]
        for number, weight in enumerate(weights):
            width, bias = len(weight), None
            _require(weight, torch.bfloat16, width, size)
            if biases is not None:
                _require(biases[number], torch.bfloat16, width)
                bias = biases[number].data_ptr()
            multiply(product, out.data_ptr(), states.data_ptr(), weight.data_ptr(), bias, width)
            product.first += width
        return out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        own: KeysAndValues,
        prefixes: KeysAndValues,
        places: SlotPlaces,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of one token per slot: `query` [R, K * G, D] bfloat16 or float32 -> the same shape and dtype.

        `key` and `value` [R, K, D] of that dtype are first written to `own`, in which slot r is in place r.
        """
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        num_rows, num_heads, size = query.shape
        query, key, value = (  # only their rows may lie apart
            states if states.stride()[1:] == (size, 1) else states.contiguous()
            for states in (query, key, value)
        )
        num_key_heads = key.shape[1]
        for pair in (own, prefixes):
            for states in pair:
                _require(
                    states, torch.float32, len(states), num_key_heads, pair.keys.shape[2], size
                )
        for tensor in places:
            _require(tensor, torch.int64, num_rows)
        out = torch.empty(num_rows, num_heads, size, dtype=query.dtype)
        step = _Decode(
            *(num_rows, num_key_heads, num_heads // num_key_heads, size),
            *(prefixes.keys.shape[2], own.keys.shape[2]),
            *(query.stride(0), key.stride(0), value.stride(0), options.window or 0),
            *(None if tensor is None else tensor.data_ptr() for tensor in (*places, sinks)),
            *(scale, options.softcap or 0.0, *_setting(query)),
        )
        tensors = (out, query, key, value, *own, *prefixes)
        self._loops["attend"](step, *(tensor.data_ptr() for tensor in tensors))
        return out

    def normalize(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm of [..., D] bfloat16 or float32, by `weight` [D] in the same dtype."""
        states = states.contiguous()
        out, size = torch.empty_like(states), states.shape[-1]
        _require(weight, states.dtype, size)
        rows = (states.data_ptr(), weight.data_ptr(), states.numel() // size, size)
        self._loops["normalize"](out.data_ptr(), *rows, epsilon, *_setting(states))
        return out

    def add_and_normalize(
        self, states: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of [..., D] and [..., D], and its norm."""
        states = states + added
        return states, self.normalize(states, weight, epsilon)

    def rotate(self, states: Tensor, num_turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of the first `num_turned` heads of [..., H, D], in place; returns the whole.

        `cos` and `sin` are [..., D]; all are contiguous and of one dtype, bfloat16 or float32.
        """
        num_heads, size = states.shape[-2:]
        _require(states, states.dtype, *states.shape)
        for tensor in (cos, sin):
            _require(tensor, states.dtype, *states.shape[:-2], size)
        sizes = (states.numel() // (num_heads * size), num_heads, num_turned, size)
        self._loops["rotate"](
            states.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes, *_setting(states)
        )
        return states

    def gate(self, states: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2 * F] bfloat16 or float32, contiguous, the gate first -> [..., F]."""
        _require(states, states.dtype, *states.shape)
        width = states.shape[-1] // 2
        out = torch.empty(*states.shape[:-1], width, dtype=states.dtype)
        sizes = (out.numel() // width, width)
        self._loops["gate"](out.data_ptr(), states.data_ptr(), *sizes, *_setting(states))
        return out


def _require(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """The loops know addresses alone: what lies there must be what they take it for."""
    found = (tensor.dtype, tensor.shape, tensor.is_contiguous())
    assert found == (dtype, shape, True), f"got {found}, expected {(dtype, shape, True)}"


def _setting(states: Tensor) -> tuple[bool, int]:
    """Whether a tensor is bfloat16, and how many threads there are."""
    return states.dtype == torch.bfloat16, torch.get_num_threads()


def kernels() -> Kernels | None:
    """The compiled loops, or None where this machine has none."""
    return _find()[0]


def about_kernels() -> str:
    """Which loops this machine has, for people to read."""
    return _find()[1]


@cache
def _find() -> tuple[Kernels | None, str]:
    try:
        found = _load()
    except _UnavailableError as error:
        return None, f"no compiled loops, for {error}"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return (
            None,
            f"no compiled loops, for they cannot be made, kept or loaded: {error} (XDG_CACHE_HOME says where)",
        )
    return found, f"loops compiled with {found.compiler}"


def _load() -> Kernels:
    if not torch.cpu._is_avx512_supported():
        raise _UnavailableError("this processor has no AVX-512")
    if (compiler := next(filter(None, map(shutil.which, _COMPILERS)), None)) is None:
        raise _UnavailableError("there is no C compiler here (gcc would make generation faster)")
    version = _run(compiler, "--version").partition("\n")[0]
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line for line in lines if line.startswith("flags")), "")
    depends_on = "\n".join(
        (_SOURCE.read_text(encoding="utf-8"), *_FLAGS, version, processor)
    ).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quadriga"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:  # what lies there is run
        raise _UnavailableError(
            f"others may write to {folder} (chmod go-w, or another XDG_CACHE_HOME)"
        )
    library = folder / f"kernels-{hashlib.sha256(depends_on).hexdigest()[:16]}.so"
    try:
        return Kernels(ctypes.CDLL(str(library)), version)
    except OSError:  # there is none yet, or a broken one
        _compile(compiler, library)
    return Kernels(ctypes.CDLL(str(library)), version)


def _compile(compiler: str, library: Path) -> None:
    """Several processes may do so at once: the file appears when it is whole and was loaded."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(compiled))
        # Without -fopenmp: no OpenMP library beside torch's, whose threads would stand in each other's way.
        _run(compiler, "-shared", str(compiled), "-o", str(linked))
        ctypes.CDLL(str(linked))
        os.replace(linked, library)


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        raise _UnavailableError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
