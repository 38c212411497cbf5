# SPDX-License-Identifier: Apache-2.0
"""Offloaded tensors of an engine, which are on the host between its phases, kind by kind.

sleep   offload every kind
wake    start to load some kinds onto the device
wait    wait until they have been loaded
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from quadriga.engines.fsdp.offload import MappedFile, PinnedCopy
from quadriga.errors import EngineError
from quadriga.observe.machine import is_in_memory, release_free_memory


class OffloadedTensors:
    """Host memory for the offloadable tensors of a role.

    Args:
        device: device of the model.
        name: role of the model, for messages.

    Attributes:
        memory: host memory by kind of tensors.
        asleep: kinds that are offloaded at present.
        is_changed: whether tensors have changed since they were last offloaded.
        frees_gradients: whether the engine frees its sums of gradients when it sleeps.
        copying: a background copy that reads the tensors, which are not offloaded until it is
            done. None before the first copy.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._name = name
        self._stream: torch.cuda.Stream | None = None
        self.memory: dict[str, MappedFile | PinnedCopy] = {}
        self.asleep: set[str] = set()
        self.is_changed = False
        self.frees_gradients = False
        self.copying: Future[None] | None = None

    def add(
        self, kind: str, tensors: Sequence[torch.Tensor], folder: Path
    ) -> Sequence[torch.Tensor]:
        """Allocate host memory for the tensors of a kind. On a CPU, also copy the tensors to it.

        Args:
            kind: name of the kind.
            tensors: tensors [...] on the device.
            folder: folder for memory-mapped files, on a CPU.

        Returns:
            On a CPU, copies [...] of the tensors, to be used in their place; on a GPU, none.

        Raises:
            ConfigError: the host or the disk lacks space.
        """
        label = f"{kind} of the {self._name}"
        if self._device.type == "cuda":
            # One stream for the copies of all kinds, which do not wait for computation.
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self.memory[kind] = PinnedCopy(tensors, self._stream, label)
            return ()
        file = MappedFile(tensors, folder, label)
        self.memory[kind] = file
        return file.windows

    def sleep(self) -> None:
        """Offload every kind."""
        if not self.memory:
            return
        self.await_copy()
        for kind in self.memory.keys() - self.asleep:
            # Tensors that did not change since they were loaded need not be copied back.
            self.memory[kind].sleep(is_changed=self.is_changed)
        self.is_changed = False
        self.asleep = set(self.memory)
        release_free_memory()

    def wake(self, kinds: Collection[str]) -> None:
        """Start to load some kinds onto the device."""
        for kind, memory in self.memory.items():
            if kind in kinds:
                memory.wake()
                self.asleep.discard(kind)

    def wait(self, kinds: Collection[str]) -> None:
        """Wait until some kinds are on the device.

        Raises:
            EngineError: one of them is offloaded.
        """
        asleep = self.asleep.intersection(kinds)
        if asleep:
            raise EngineError(
                f"the {self._name}",
                got=f"a call with {' and '.join(sorted(asleep))} offloaded to the host",
                expected="a call within `awake`, which loads them onto the device",
            )
        for kind in self.memory.keys() & kinds:
            self.memory[kind].wait()

    def await_copy(self) -> None:
        """Wait for the background copy, which may still read the tensors."""
        if self.copying is not None:
            self.copying.result()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host copy of a tensor [...] offloaded on CUDA, else the tensor itself."""
        for kind in self.asleep:
            memory = self.memory[kind]
            if isinstance(memory, PinnedCopy):
                copy = memory.on_host(tensor)
                if copy is not None:
                    return copy
        return tensor

    def describe(self, folder: Path) -> str:
        """Describe kinds, sizes and place of offloaded tensors, to be appended to a sentence.

        Args:
            folder: folder of the memory-mapped files, on a CPU.

        Returns:
            The description, starting with a semicolon; "" if nothing is offloaded.
        """
        if not self.memory:
            return ""
        where = f"memory-mapped files in {folder}"
        if self._device.type == "cuda":
            where = "pinned host memory"
        elif is_in_memory(folder):
            where += ", which is itself in memory: set trainer.offload_dir to a disk"
        sizes = []
        for kind, memory in self.memory.items():
            sizes.append(f"{kind} ({memory.num_bytes / 1e6:.0f} MB)")
        return f"; {', '.join(sizes)} offloaded between phases, to {where}"
