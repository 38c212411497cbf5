# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a role are arranged. Arithmetic alone: it runs on the driver before a process starts.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * sp + q) * tp + t      neighbours in rank: the most talk

    pp             pipeline parallelism: each stage has some of the layers
    dp_replicate   data parallelism: each has a replica of the weights, and rows of its own
    dp_shard       FSDP: they shard one copy of the weights, and have rows of their own
    sp             sequence parallelism (Ulysses): they share rows, each computes some of the tokens
    ep             expert parallelism: neighbours among the dp_shard x sp ranks divide the experts of each layer
    tp             tensor parallelism: they share rows, each computes some of the heads, of the MLP, of the vocabulary

One data-parallel rank is the pp x sp x tp ranks that get the same rows; the first rank of its last stage returns the
outputs. One copy of the weights is sharded over dp_shard x sp ranks (times pp and tp, which have different weights).
"""

from dataclasses import dataclass
from math import gcd

from quadriga.errors import ConfigError


@dataclass(frozen=True)
class RankPlace:
    """One rank in the layout: its number along each direction, its data-parallel rank, whether it returns outputs."""

    pp: int
    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int
    dp_rank: int
    is_collected: bool


@dataclass(frozen=True)
class Layout:
    """How many ranks there are along each direction."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    has_own_modules: bool = False
    """Whether another library's modules compute: no rank has the weights as transformers' modules have them."""

    @classmethod
    def of(
        cls,
        world_size: int,
        where: str,
        *,
        fsdp: int = -1,
        sp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
    ) -> "Layout":
        """The layout of `world_size` ranks; ConfigError at `where`, their section, if the sizes do not divide them.
        `fsdp`: ranks that shard one copy of the weights, pp and tp aside: a multiple of `sp`; 1: none; -1: all.
        `sp`, `tp`, `pp`: ranks that share the rows of a data-parallel rank, in each of three ways.
        `ep`: of the ranks that shard one copy, those that divide the experts."""
        shared, named = sp * tp * pp, f"tp={tp} sp={sp} pp={pp}"
        if world_size % shared:
            expected, fix = (
                f"a multiple of {shared} processes",
                "Change them, or trainer.nnodes and n_gpus_per_node.",
            )
            raise ConfigError(
                where, got=f"{world_size} processes for {named}", expected=expected, fix=fix
            )
        num_data = world_size // shared
        holders = num_data * sp if fsdp == -1 else fsdp
        if holders % sp or num_data % (holders // sp or 1) or holders < sp:
            fix = f"{world_size} processes with {named} leave {num_data} data-parallel ranks."
            expected = f"-1, or a multiple of {sp} that divides {num_data * sp}"
            raise ConfigError(
                f"{where}.fsdp_config.fsdp_size", got=str(fsdp), expected=expected, fix=fix
            )
        if holders % ep or (tp > 1 and ep > 1):
            got = f"{ep}, with {holders} ranks that shard one copy of the weights" + (
                f" and tp={tp}" if tp > 1 else ""
            )
            expected, fix = (
                "a number that divides them, or 1 with tensor parallelism",
                "Choose another one.",
            )
            raise ConfigError(f"{where}.expert_parallel_size", got=got, expected=expected, fix=fix)
        return cls(pp, num_data // (holders // sp), holders // sp, sp, tp, ep)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_size * self.sp * self.tp

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: how many chunks a batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that shard one copy of a parameter, pp and tp aside."""
        return self.dp_shard * self.sp

    @property
    def edp(self) -> int:
        """Ranks with the same experts that shard them."""
        return gcd(self.world_size // self.pp // self.ep, max(1, self.fsdp * self.tp // self.ep))

    def state_bytes(
        self, of_experts: int, others: int, itemsize: int, *, is_trained: bool
    ) -> float:
        """About what a rank keeps of a model with so many parameters in experts and elsewhere: weights of `itemsize`
        bytes each that compute, and where it learns float32 masters, AdamW's moments and sums of gradients."""
        if not self.has_own_modules:
            computing = (
                itemsize if self.is_whole and itemsize < 4 else 0
            )  # sharded ones are gathered layer by layer
            shared = self.pp * self.tp * self.fsdp
            return (of_experts + others) / shared * (16 + computing if is_trained else itemsize)
        experts, rest = of_experts / (self.pp * self.ep), others / (self.pp * self.tp)
        masters = 12 * (experts / self.edp + rest / self.fsdp) if is_trained else 0
        return (experts + rest) * (itemsize + 4 * is_trained) + masters

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all weights, and computes its rows alone."""
        return self.pp == self.fsdp == self.tp == 1 and not self.has_own_modules

    def place(self, rank: int) -> RankPlace:
        """Where a rank stands."""
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        rest, dp_shard = divmod(rest, self.dp_shard)
        pp, dp_replicate = divmod(rest, self.dp_replicate)
        is_collected = pp == self.pp - 1 and sp == tp == 0
        return RankPlace(
            pp,
            dp_replicate,
            dp_shard,
            sp,
            tp,
            dp_replicate * self.dp_shard + dp_shard,
            is_collected,
        )

    def table(self) -> str:
        """The ranks as a table for people: one line for each data-parallel rank."""
        lines = [f"{'dp rank':<9}{'ranks':<24}outputs from"]
        for dp_rank in range(self.dp_size):
            members = [
                rank for rank in range(self.world_size) if self.place(rank).dp_rank == dp_rank
            ]
            collected = next(rank for rank in members if self.place(rank).is_collected)
            lines.append(
                f"{f'{dp_rank}/{self.dp_size}':<9}{' '.join(map(str, members)):<24}{collected}"
            )
        return "\n".join(lines)

    def describe(self) -> str:
        """The sizes, for people: `fsdp=2 tp=2 sp=1 pp=1`."""
        if self.world_size == 1:
            return "one process"
        replicas = f"dp_replicate={self.dp_replicate} " if self.dp_replicate > 1 else ""
        experts = f" ep={self.ep}" if self.ep > 1 else ""
        return f"{replicas}fsdp={self.fsdp} tp={self.tp} sp={self.sp} pp={self.pp}{experts}"


@dataclass(frozen=True)
class ModelShape:
    """What of a model has to be divisible; `name` is its architecture's, for errors."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tensor_plan: (
        dict[str, str] | None
    )  # style by module name, as transformers declares it; None: it declares none
    num_experts: int = 0  # of a layer; 0: it has none


TENSOR_STYLES = {"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"}
TENSOR_STYLES |= {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of transformers' plans that `parallel.tensor_parallel` knows."""


def check_model(layout: Layout, model: ModelShape, where: str) -> None:
    """Raise one ConfigError with everything about a model that does not fit a layout."""
    problems, tp, heads = [], layout.tp, model.num_heads
    if layout.pp > model.num_layers:
        problems.append(f"{model.num_layers} layers for {layout.pp} pipeline stages")
    if tp > 1:
        styles = sorted(set((model.tensor_plan or {}).values()) - TENSOR_STYLES)
        if model.tensor_plan is None:
            problems.append("an architecture without a plan for tensor parallelism in transformers")
        elif styles:
            problems.append(
                f"a plan for tensor parallelism with {', '.join(styles)}, which are not known here"
            )
        if heads % tp or model.num_kv_heads % tp:
            problems.append(
                f"{heads} heads and {model.num_kv_heads} key-value heads for tensor parallelism over {tp}"
            )
    if layout.ep > 1 and (not model.num_experts or model.num_experts % layout.ep):
        problems.append(
            f"{model.num_experts or 'no'} experts for expert parallelism over {layout.ep}"
        )
    if heads // tp % layout.sp:
        problems.append(f"{heads // tp} heads for sequence parallelism over {layout.sp}")
    if problems:
        expected = f"a model that {layout.describe()} can divide"
        fix = "Choose sizes that divide these numbers; fsdp_size has no such limits."
        raise ConfigError(
            f"{where}: {model.name}", got="; ".join(problems), expected=expected, fix=fix
        )
