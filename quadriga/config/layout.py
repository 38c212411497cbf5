# SPDX-License-Identifier: Apache-2.0
"""Arrangement of a role's ranks, computed on the driver before a process starts.

    rank = (((p * dp_replicate + r) * dp_shard + s) * sp + q) * tp + t

for indices p, r, s, q, t along the dimensions below. Neighbouring ranks communicate most.

    pp             pipeline parallelism: each stage has some of the layers
    dp_replicate   data parallelism: each rank has a replica of the weights, and its own rows
    dp_shard       FSDP: the ranks shard one copy of the weights, and each has its own rows
    sp             sequence parallelism (Ulysses): the ranks share rows; each computes some tokens
    ep             expert parallelism: neighbours among the dp_shard x sp ranks divide the experts of
                   each layer
    tp             tensor parallelism: the ranks share rows; each computes some of the heads, of the
                   MLP and of the vocabulary

A data-parallel rank is the pp x sp x tp ranks that get the same rows; the first rank of its last
stage returns the outputs. One copy of the weights is sharded over dp_shard x sp ranks (times pp and
tp, which have different weights).
"""

from dataclasses import dataclass
from math import gcd

from quadriga.errors import ConfigError


@dataclass(frozen=True)
class RankPlace:
    """Position of a rank in a layout.

    Attributes:
        pp, dp_replicate, dp_shard, sp, tp: its index in each dimension.
        dp_rank: its data-parallel rank.
        is_collected: whether it returns the outputs of its data-parallel rank.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int
    dp_rank: int
    is_collected: bool


@dataclass(frozen=True)
class Layout:
    """Number of ranks in each dimension."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    uses_megatron_modules: bool = False
    """Whether Megatron-core's modules compute the model, instead of those of transformers."""

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
        """Arrange ranks.

        Args:
            world_size: number of ranks.
            where: key of the role's section, for errors.
            fsdp: number of ranks that shard one copy of the weights, not counting pp and tp; a
                multiple of `sp`. 1: no sharding; -1: all ranks.
            sp, tp, pp: number of ranks in each dimension within a data-parallel rank.
            ep: number of ranks that divide the experts, among those that shard one copy.

        Raises:
            ConfigError: the sizes do not divide the ranks, or `tp` and `ep` are both above 1.
        """
        ranks_per_row = sp * tp * pp
        sizes = f"tp={tp} sp={sp} pp={pp}"
        if world_size % ranks_per_row:
            raise ConfigError(
                where,
                got=f"{world_size} processes for {sizes}",
                expected=f"a multiple of {ranks_per_row} processes",
                fix="Change them, or trainer.nnodes and n_gpus_per_node.",
            )

        # Number of data-parallel ranks, dp_replicate x dp_shard.
        num_data = world_size // ranks_per_row
        # Ranks of sequence parallelism shard the weights too, so `fsdp` counts them.
        num_sharding = num_data * sp if fsdp == -1 else fsdp
        dp_shard = num_sharding // sp
        if num_sharding < sp or num_sharding % sp or num_data % dp_shard:
            raise ConfigError(
                f"{where}.fsdp_config.fsdp_size",
                got=str(fsdp),
                expected=f"-1, or a multiple of {sp} that divides {num_data * sp}",
                fix=f"Choose another size: {world_size} processes with {sizes} are {num_data} "
                "data-parallel ranks.",
            )

        # Experts are divided among the ranks that shard one copy.
        if num_sharding % ep or (tp > 1 and ep > 1):
            got = f"{ep}, with {num_sharding} ranks that shard one copy of the weights"
            if tp > 1:
                got += f" and tp={tp}"
            raise ConfigError(
                f"{where}.expert_parallel_size",
                got=got,
                expected="a number that divides them, or 1 with tensor parallelism",
                fix="Choose another one.",
            )
        return cls(pp, num_data // dp_shard, dp_shard, sp, tp, ep)

    @property
    def world_size(self) -> int:
        """Number of ranks. `ep` is no factor: its ranks are among those of dp_shard x sp."""
        return self.pp * self.dp_size * self.sp * self.tp

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which is the number of chunks that a batch is split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that shard one copy of a parameter, not counting pp and tp."""
        return self.dp_shard * self.sp

    @property
    def edp(self) -> int:
        """Number of ranks that have the same experts and shard the optimizer state of these.

        A stage has world_size / (pp ep) ranks with the same experts. Fewer of them shard the state if
        there are replicas, or on Megatron-core without a distributed optimizer.
        """
        # The ranks with the same experts are divided into groups of this size, so it must divide their
        # number. `fsdp * tp` need not be a multiple of `ep` on Megatron-core, and may be below it.
        return gcd(self.world_size // self.pp // self.ep, max(1, self.fsdp * self.tp // self.ep))

    def state_bytes(
        self, num_expert_weights: int, num_other_weights: int, itemsize: int, *, is_trained: bool
    ) -> float:
        """Approximate size of the model state that a rank holds, in bytes.

        This includes the weights for computation and, in training, float32 master weights, the
        moments of AdamW and the sums of gradients.

        Args:
            num_expert_weights: number of parameters in experts.
            num_other_weights: number of all other parameters.
            itemsize: bytes per parameter of the weights for computation.
            is_trained: whether the model is trained.
        """
        if not self.uses_megatron_modules:
            # `ep` is no factor, because its ranks are among those of `fsdp`.
            num_shards = self.pp * self.tp * self.fsdp
            bytes_per_parameter = itemsize
            if is_trained:
                # 4 bytes each for master weights, two moments and the gradient. A rank with whole
                # weights has a copy in the compute dtype; sharded ones are gathered by layer.
                has_copy = self.is_whole and itemsize < 4
                bytes_per_parameter = 16 + (itemsize if has_copy else 0)
            num_weights = num_expert_weights + num_other_weights
            return num_weights / num_shards * bytes_per_parameter
        # Megatron-core divides experts over ep, and not over tp, because the engine sets
        # `expert_tensor_parallel_size` to 1. It divides all other weights over tp.
        expert_weights = num_expert_weights / (self.pp * self.ep)
        other_weights = num_other_weights / (self.pp * self.tp)
        if not is_trained:
            return (expert_weights + other_weights) * itemsize
        # Master weights and two moments, 4 bytes each, are sharded over the data-parallel ranks.
        optimizer_bytes = 12 * (expert_weights / self.edp + other_weights / self.fsdp)
        # The gradient has 4 bytes for each weight of the rank.
        return (expert_weights + other_weights) * (itemsize + 4) + optimizer_bytes

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all weights, in modules of transformers, and computes alone."""
        return self.pp == self.fsdp == self.tp == 1 and not self.uses_megatron_modules

    def place(self, rank: int) -> RankPlace:
        """Find the position of a rank: solve the formula at the top of the file for the indices."""
        remainder, tp = divmod(rank, self.tp)
        remainder, sp = divmod(remainder, self.sp)
        remainder, dp_shard = divmod(remainder, self.dp_shard)
        pp, dp_replicate = divmod(remainder, self.dp_replicate)
        return RankPlace(
            pp=pp,
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            sp=sp,
            tp=tp,
            dp_rank=dp_replicate * self.dp_shard + dp_shard,
            is_collected=pp == self.pp - 1 and sp == tp == 0,
        )

    def table(self) -> str:
        """Format the ranks as a table with a line for each data-parallel rank."""
        lines = [f"{'dp rank':<9}{'ranks':<24}outputs from"]
        for dp_rank in range(self.dp_size):
            members = [
                rank for rank in range(self.world_size) if self.place(rank).dp_rank == dp_rank
            ]
            collected = next(rank for rank in members if self.place(rank).is_collected)
            fraction = f"{dp_rank}/{self.dp_size}"
            lines.append(f"{fraction:<9}{' '.join(map(str, members)):<24}{collected}")
        return "\n".join(lines)

    def describe(self) -> str:
        """Format the sizes: `fsdp=2 tp=2 sp=1 pp=1`, with dp_replicate and ep if above 1.

        `fsdp` counts the ranks of `sp`, too.
        """
        if self.world_size == 1:
            return "one process"
        replicas = f"dp_replicate={self.dp_replicate} " if self.dp_replicate > 1 else ""
        experts = f" ep={self.ep}" if self.ep > 1 else ""
        return f"{replicas}fsdp={self.fsdp} tp={self.tp} sp={self.sp} pp={self.pp}{experts}"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that a layout must divide.

    Attributes:
        name: name of its architecture, for errors.
        num_layers, num_heads, num_kv_heads: sizes of the model.
        tensor_plan: style of tensor parallelism by module name, as transformers declares it; None
            if it declares none.
        num_experts: experts of a layer; 0 without experts.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tensor_plan: dict[str, str] | None
    num_experts: int = 0


TENSOR_STYLES = {"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"}
TENSOR_STYLES |= {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of tensor parallelism in transformers' plans that `parallel.tensor_parallel` supports."""


def check_model(layout: Layout, model: ModelShape, where: str) -> None:
    """Check that a layout divides a model.

    Args:
        layout: the layout.
        model: the sizes of the model.
        where: key of the role's section, for errors.

    Raises:
        ConfigError: all sizes that do not fit, in one error.
    """
    problems = []
    if layout.pp > model.num_layers:
        problems.append(f"{model.num_layers} layers for {layout.pp} pipeline stages")
    if layout.tp > 1:
        problems += _tensor_parallel_problems(layout.tp, model)
    if layout.ep > 1 and (not model.num_experts or model.num_experts % layout.ep):
        num_experts = model.num_experts or "no"
        problems.append(f"{num_experts} experts for expert parallelism over {layout.ep}")
    # Sequence parallelism divides the heads that tensor parallelism leaves to a rank.
    num_heads = model.num_heads // layout.tp
    if num_heads % layout.sp:
        problems.append(f"{num_heads} heads for sequence parallelism over {layout.sp}")
    if problems:
        raise ConfigError(
            f"{where}: {model.name}",
            got="; ".join(problems),
            expected=f"a model that {layout.describe()} can divide",
            fix="Choose sizes that divide these numbers; fsdp_size has no such limits.",
        )


def _tensor_parallel_problems(tp: int, model: ModelShape) -> list[str]:
    """List the reasons why a model cannot be split over `tp` ranks."""
    problems = []
    unknown_styles = sorted(set((model.tensor_plan or {}).values()) - TENSOR_STYLES)
    if model.tensor_plan is None:
        problems.append("an architecture without a plan for tensor parallelism in transformers")
    elif unknown_styles:
        styles = ", ".join(unknown_styles)
        problems.append(f"a plan for tensor parallelism with {styles}, which are not supported")
    if model.num_heads % tp or model.num_kv_heads % tp:
        heads = f"{model.num_heads} heads and {model.num_kv_heads} key-value heads"
        problems.append(f"{heads} for tensor parallelism over {tp}")
    return problems
