# SPDX-License-Identifier: Apache-2.0
"""How the processes of a role are arranged. Arithmetic alone: it runs on the driver before a process starts.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * sp + q) * tp + t      neighbours in rank: the most talk

    pp             pipeline: each holds some of the layers
    dp_replicate   data: each has a copy of the weights, and rows of its own
    dp_shard       data: they hold one copy together, and have rows of their own
    sp             sequence (Ulysses): they share rows, each computes some of the tokens
    tp             tensor: they share rows, each computes some of the heads, of the MLP and of the vocabulary

One data-parallel rank is the pp x sp x tp processes that get the same rows; the last stage's first process answers.
One copy of the weights lies on dp_shard x sp processes (times pp and tp, which have different weights).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quadriga.config.optimizer import ParallelConfig
from quadriga.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    """What a configuration asks for.

    Attributes:
        fsdp: processes that hold one copy of the weights together, of those with the same place in pp and tp: a
            multiple of `sequence`; 1: every process has whole ones; -1: all of them.
        sequence, tensor, pipeline: processes that share the rows of a data-parallel rank, in each of three ways.
    """

    fsdp: int = -1
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, fsdp_size: int, section: ParallelConfig) -> "Sizes":
        """Those of a role's section."""
        return cls(
            fsdp_size,
            section.ulysses_sequence_parallel_size,
            section.tensor_model_parallel_size,
            section.pipeline_model_parallel_size,
        )


@dataclass(frozen=True)
class RankPlace:
    """One process in the layout: its number along each direction, its data-parallel rank, and whether it answers."""

    pp: int
    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int
    dp_rank: int
    is_collected: bool


@dataclass(frozen=True)
class Layout:
    """How many processes there are along each direction."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, world_size: int, sizes: Sizes, where: str) -> "Layout":
        """The layout of `world_size` processes.

        Args:
            world_size: of the role.
            sizes: asked for.
            where: section of the configuration, for errors.

        Raises:
            ConfigError: the sizes do not divide the processes.
        """
        shared = sizes.sequence * sizes.tensor * sizes.pipeline
        if world_size % shared:
            raise ConfigError(
                where,
                got=f"{world_size} processes for {_named(sizes)}",
                expected=f"a multiple of {shared} processes",
                fix="Change the sizes, or trainer.nnodes and trainer.n_gpus_per_node.",
            )
        num_data = world_size // shared
        holders = num_data * sizes.sequence if sizes.fsdp == -1 else sizes.fsdp
        if holders % sizes.sequence or num_data % (holders // sizes.sequence or 1) or holders < sizes.sequence:
            raise ConfigError(
                f"{where}.fsdp_config.fsdp_size",
                got=f"{sizes.fsdp}",
                expected=f"-1, or a multiple of {sizes.sequence} that divides {num_data * sizes.sequence}",
                fix=f"{world_size} processes with {_named(sizes)} leave {num_data} data-parallel ranks.",
            )
        dp_shard = holders // sizes.sequence
        return cls(sizes.pipeline, num_data // dp_shard, dp_shard, sizes.sequence, sizes.tensor)

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.pp * self.dp_size * self.sp * self.tp

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: how many chunks a batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Processes that hold one copy of a parameter together, pp and tp aside."""
        return self.dp_shard * self.sp

    @property
    def is_whole(self) -> bool:
        """Whether every process has all weights, and computes its rows alone."""
        return self.pp == self.fsdp == self.tp == 1

    def place(self, rank: int) -> RankPlace:
        """Where a rank stands."""
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        rest, dp_shard = divmod(rest, self.dp_shard)
        pp, dp_replicate = divmod(rest, self.dp_replicate)
        is_collected = pp == self.pp - 1 and sp == tp == 0
        return RankPlace(pp, dp_replicate, dp_shard, sp, tp, dp_replicate * self.dp_shard + dp_shard, is_collected)

    def table(self) -> str:
        """The ranks as a table for people: one line for each data-parallel rank."""
        lines = [f"{'rows':<8}{'ranks':<24}answers"]
        for dp_rank in range(self.dp_size):
            members = [rank for rank in range(self.world_size) if self.place(rank).dp_rank == dp_rank]
            collected = next(rank for rank in members if self.place(rank).is_collected)
            lines.append(f"dp {dp_rank:<5}{' '.join(map(str, members)):<24}{collected}")
        return "\n".join(lines)

    def describe(self) -> str:
        """The directions with more than one process, in words."""
        parts = [
            (self.pp, "pipeline stages"),
            (self.dp_replicate, "copies of the weights"),
            (self.fsdp, "processes with a share of each weight"),
            (self.sp, "processes for a sequence"),
            (self.tp, "processes for a layer"),
        ]
        return ", ".join(f"{size} {name}" for size, name in parts if size > 1) or "one process"


@dataclass(frozen=True)
class ModelShape:
    """What of a model has to be divisible.

    Attributes:
        name: of the architecture, for errors.
        num_layers, num_heads, num_kv_heads: of the model.
        tensor_plan: style by module name, as transformers declares it; None: it declares none.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tensor_plan: dict[str, str] | None


TENSOR_STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"})
"""Styles of transformers' plans that `parallel.tensor_parallel` knows."""


def check_model(layout: Layout, model: ModelShape, where: str) -> None:
    """Raise one ConfigError with everything about a model that does not fit a layout."""
    problems = list(_problems(layout, model))
    if problems:
        raise ConfigError(
            f"{where}: {model.name}",
            got="; ".join(problems),
            expected=f"a model that {layout.describe()} can share",
            fix="Choose sizes that divide these numbers; fsdp_size has no such limits.",
        )


def _problems(layout: Layout, model: ModelShape) -> Iterator[str]:
    if layout.pp > model.num_layers:
        yield f"{model.num_layers} layers for {layout.pp} pipeline stages"
    if layout.tp > 1:
        styles = sorted(set((model.tensor_plan or {}).values()) - TENSOR_STYLES)
        if model.tensor_plan is None:
            yield "an architecture without a plan for tensor parallelism in transformers"
        elif styles:
            yield f"a plan for tensor parallelism with {', '.join(styles)}, which are not known here"
        if model.num_heads % layout.tp or model.num_kv_heads % layout.tp:
            yield (
                f"{model.num_heads} heads and {model.num_kv_heads} key-value heads for tensor parallelism "
                f"over {layout.tp}"
            )
    if model.num_heads // layout.tp % layout.sp:
        yield f"{model.num_heads // layout.tp} heads for sequence parallelism over {layout.sp}"


def _named(sizes: Sizes) -> str:
    return (
        f"tensor x sequence x pipeline parallelism of {sizes.tensor} x {sizes.sequence} x {sizes.pipeline}"
        if (sizes.tensor, sizes.sequence, sizes.pipeline) != (1, 1, 1)
        else "data parallelism"
    )
