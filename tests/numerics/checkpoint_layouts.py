# SPDX-License-Identifier: Apache-2.0
"""The program that test_checkpoint_layouts.py starts in four processes: states of every layout, written, copied, read.

python checkpoint_layouts.py RANK FOLDER PORT PORT PORT PORT

write   by 4 of them, then by 2, then by the first alone
read    by 2 of them, then by 4, then by the first alone: what all have written
"""

import errno
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from quadriga.engines import process_group
from quadriga.engines.checkpoint import StateCopier, StateWriter, load_state, read_copy
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import CheckpointError
from quadriga.models.weight_files import open_weights
from quadriga.protocol.memory import slot_of
from quadriga.single_controller import WorkerPlace

CPU = torch.device("cpu")
SHAPES = {
    "wide": (8, 6),
    "few": (2, 5),
    "long": (17,),
    "one": (1,),
    "cube": (4, 3, 2),
    "tall": (9, 4),
    "pair": (2, 2),
}
# Of two stages of a pipeline; each shape once, and one of them in both.
NAMES = [
    "first.wide",
    "first.long",
    "first.one",
    "first.cube",
    "second.few",
    "second.tall",
    "second.pair",
    "second.long",
]
PARTS = ("model", "optimizer")
BY_FOUR = ["fsdp 4", "hsdp 2x2", "tp 4", "fsdp 2 x tp 2", "pp 2 x fsdp 2"]
BY_TWO = ["fsdp 2", "tp 2", "pp 2", "replicas 2"]
ALL = [*BY_FOUR, *BY_TWO, "whole"]
# These write the same parts of tensors as "fsdp 2", "tp 4" or "whole" do, or halves of them: two processes read them.
READ_BY_TWO_ALONE = ("hsdp 2x2", "tp 2", "replicas 2")
PAIRS = [
    (writer, reader)
    for reader in ALL
    for writer in ALL
    if reader in BY_TWO or writer not in READ_BY_TWO_ALONE
]
Spread = Callable[[str, torch.Tensor], torch.Tensor | None]


def shape_of(name: str) -> tuple[int, ...]:
    return SHAPES[name.rpartition(".")[2]]


def whole_state() -> dict[str, dict[str, torch.Tensor]]:
    """All numbers of both folders, each tensor of its own."""
    generator = torch.Generator().manual_seed(0)

    def draw(name: str) -> torch.Tensor:
        return torch.randn(shape_of(name), generator=generator)

    model = {f"model.{name}": draw(name) for name in NAMES}
    moments = {
        f"optimizer.{kind}.{name}": draw(name)
        for kind in ("exp_avg", "exp_avg_sq")
        for name in NAMES
    }
    steps = {
        f"optimizer.step.{name}": torch.tensor(float(number)) for number, name in enumerate(NAMES)
    }
    return {"model": model, "optimizer": moments | steps}


def spread(layout: str, rank: int) -> Spread:
    """What a rank of a layout holds of a whole tensor; None: nothing."""

    def by_dimension(tensor: torch.Tensor) -> Any:
        return Shard(1) if tensor.dim() > 1 else Replicate()

    match layout:
        case "fsdp 4" | "fsdp 2":
            mesh = init_device_mesh("cpu", (int(layout[-1]),))
            cut = lambda tensor: (mesh, [Shard(0)])  # noqa: E731
        case "tp 4" | "tp 2":
            mesh = init_device_mesh("cpu", (int(layout[-1]),))
            cut = lambda tensor: (mesh, [by_dimension(tensor)])  # noqa: E731
        case "hsdp 2x2":
            mesh = init_device_mesh("cpu", (2, 2))
            cut = lambda tensor: (mesh, [Replicate(), Shard(0)])  # noqa: E731
        case "fsdp 2 x tp 2":
            mesh = init_device_mesh("cpu", (2, 2))
            cut = lambda tensor: (mesh, [by_dimension(tensor), Shard(0)])  # noqa: E731
        case "pp 2 x fsdp 2":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"]
            cut = lambda tensor: (mesh, [Shard(0)])  # noqa: E731
        case _:
            cut = lambda tensor: None  # noqa: E731
    stages = {"pp 2": 1, "pp 2 x fsdp 2": 2}

    def hold(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if layout in stages and ("first" in name) != (rank // stages[layout] == 0):
            return None
        where = None if tensor.dim() == 0 else cut(tensor)
        return (
            tensor.clone()
            if where is None
            else distribute_tensor(tensor, *where, src_data_rank=None)
        )

    return hold


def state_of(layout: str, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    hold = spread(layout, rank)
    held = {
        part: {name: hold(name, tensor) for name, tensor in state.items()}
        for part, state in whole_state().items()
    }
    return {
        part: {name: one for name, one in state.items() if one is not None}
        for part, state in held.items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clear(states: dict[str, dict[str, torch.Tensor]]) -> None:
    for state in states.values():
        for tensor in state.values():
            local(tensor).fill_(float("nan"))


def write(folder: Path, layouts: Sequence[str], world: ProcessGroup) -> None:
    """Each layout's state; the memory is cleared as soon as the call returns."""
    writer = StateWriter(world)
    for layout in layouts:
        states = state_of(layout, world.rank)
        writer.start({folder / layout / part: state for part, state in states.items()})
        clear(states)
        writer.is_written(wait=True)
        copy(folder / layout, layout, world)


def copy(folder: Path, layout: str, world: ProcessGroup) -> None:
    """The same state into the memory of each rank, a file here; the plan is the same on all ranks."""
    state = {
        name: tensor
        for part in state_of(layout, world.rank).values()
        for name, tensor in part.items()
    }
    copier = StateCopier(state, world)
    memory = folder / f"memory_{world.rank}"
    memory.write_bytes(bytes(2 * copier.plan.slot_bytes[world.rank]))
    copier.open(str(memory))
    copier.start(1).result()
    if world.is_first:
        (folder / "plan").write_bytes(pickle.dumps(copier.plan))
    world.totals(1)


def differences(folder: Path, writer: str, reader: str, world: ProcessGroup) -> list[str]:
    """Names of what a reader finds other than it was, on any rank."""
    expected, found = state_of(reader, world.rank), state_of(reader, world.rank)
    clear(found)
    for part in PARTS:
        load_state(folder / writer / part, found[part], world)
    unlike = unequal(expected, found)
    clear(found)

    def content(rank: int, start: int, size: int) -> bytearray:
        memory = (folder / writer / f"memory_{rank}").read_bytes()
        return bytearray(slot_of(memory, 1)[start : start + size])

    plan = pickle.loads((folder / writer / "plan").read_bytes())
    read_copy(plan, content, {name: one for state in found.values() for name, one in state.items()})
    unlike += [f"{name}, copied" for name in unequal(expected, found)]
    return [name for names in world.gather(unlike) for name in names]


def unequal(
    expected: dict[str, dict[str, torch.Tensor]], found: dict[str, dict[str, torch.Tensor]]
) -> list[str]:
    """Names of the tensors of which this rank holds other numbers."""
    return [
        name
        for part in PARTS
        for name, tensor in expected[part].items()
        if not torch.equal(local(found[part][name]), local(tensor))
    ]


def read(folder: Path, layouts: Sequence[str], world: ProcessGroup) -> dict[Any, Any]:
    return {
        (writer, reader): differences(folder, writer, reader, world)
        for writer, reader in PAIRS
        if reader in layouts
    }


def told(work: Callable[[], Any]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def full_disk(folder: Path, world: ProcessGroup) -> dict[str, Any]:
    """One rank cannot write; then it can."""
    writer, state = StateWriter(world), state_of("fsdp 2", world.rank)["model"]
    create_stream = FileSystem.create_stream

    def fail(self: FileSystem, path: str, mode: str) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if world.rank == 1:
        FileSystem.create_stream = fail

    def save() -> None:
        writer.start({folder / "full": state})
        writer.is_written(wait=True)

    error = told(save)
    FileSystem.create_stream = create_stream
    writer.start({folder / "after": state})
    return {
        "errors": world.gather(error),
        "is complete": (folder / "full" / ".metadata").exists(),
        "is written after": writer.is_written(wait=True),
    }


def others(folder: Path, world: ProcessGroup) -> list[list[str]]:
    """Two stages read the states of another model: one tensor is missing there, one has another shape."""
    state, is_second = state_of("pp 2", world.rank)["model"], world.rank == 1
    more = state | ({"model.third.wide": torch.zeros(2)} if is_second else {})
    larger = state | ({"model.second.few": torch.zeros(3, 5)} if is_second else {})
    where = folder / "pp 2" / "model"
    return world.gather([told(partial(load_state, where, each, world)) for each in (more, larger)])


def main(rank: int, folder: Path, ports: Sequence[int]) -> None:
    """Ranks that a smaller number of processes does not need wait where the others will meet them."""
    write_4, write_2, read_2, read_4 = ports
    results: dict[Any, Any] = {}

    def meet(size: int, port: int, work: Callable[[ProcessGroup], dict[Any, Any] | None]) -> None:
        if rank < size:
            world = process_group.join(WorkerPlace(rank, size, master_port=port), CPU)
            results.update(work(world) or {})
            process_group.leave(world)

    def by_two(world: ProcessGroup) -> dict[Any, Any]:
        found = read(folder, BY_TWO, world)
        return found | {"full disk": full_disk(folder, world), "others": others(folder, world)}

    meet(4, write_4, lambda world: write(folder, BY_FOUR, world))
    meet(2, write_2, lambda world: write(folder, BY_TWO, world))
    meet(1, 0, lambda world: write(folder, ["whole"], world))
    # The second rank must not read before the first has written alone: it meets it again.
    meet(2, read_2, by_two)
    meet(4, read_4, lambda world: read(folder, BY_FOUR, world))
    meet(1, 0, lambda world: read(folder, ["whole"], world))
    if rank == 0:
        results["files"] = {
            layout: list(open_weights(folder / layout / "model").shapes) for layout in ALL
        }
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), [int(port) for port in sys.argv[3:]])
