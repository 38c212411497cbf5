# SPDX-License-Identifier: Apache-2.0
"""The program that test_replicas.py starts in four processes: one case after the other, by 4, 3 and 2 of them, and by
the first alone; what came out is written for the test to compare.

    python replicas.py RANK FOLDER PORT PORT PORT
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from quadriga.algorithms.aggregate import LOSS_AGG_MODES
from quadriga.config import ActorConfig, Config, CriticConfig, OptimConfig
from quadriga.config.layout import Layout
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.checkpoint import StateWriter, load_state
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.objectives import (
    Objective,
    PolicyObjective,
    ValueObjective,
    add_rollout_tokens,
)
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ALONE, ProcessGroup
from quadriga.engines.step import infer, update
from quadriga.errors import EngineError, PeerLostError
from quadriga.models.load import load_causal_lm
from quadriga.models.scorers import PolicyScorer, ValueScorer
from quadriga.observe.metrics import reduce_metrics
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace, placed
from quadriga.trainer.responses import repeat_prompts
from quadriga.workers import ActorRolloutRefWorker

CPU, MICRO = torch.device("cpu"), MicroBatching(None, 30)
# With a large eps AdamW moves weights in proportion to the gradient: a rounding error stays one.
OPTIMIZER = OptimConfig(eps=1.0, weight_decay=0.0)
ONE_STEP = Passes(99, 1, MICRO)
SEVERAL_STEPS = Passes(5, 2, MICRO, shuffle_seed=3)
MIXED = ActorConfig(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
PLAIN = PolicyObjective(ActorConfig())


@dataclass(frozen=True)
class Case:
    """An update of some rows of the batch, dealt to ranks in a random order or cut into chunks as they are."""

    objective: Objective
    sizes: tuple[int, ...]  # how many processes there are, beside the one that learns alone
    passes: Passes = ONE_STEP
    num_rows: int | None = None
    is_dealt: bool = True
    change: Callable[[DataProto], None] = lambda batch: None


def without_advantage(batch: DataProto) -> None:
    batch.batch["advantages"].zero_()
    batch.batch["rollout_log_probs"] = batch.batch.pop("old_log_probs")


def with_rollouts_of_three_rows(batch: DataProto) -> None:
    """Every third token is one of a tool, which has a loss of its own."""
    mask = batch.batch["response_mask"]
    is_echo = (torch.arange(mask.shape[1]) % 3 == 2) & mask.bool()
    batch.batch["echo_mask"] = is_echo.long()
    batch.batch["response_mask"] = mask * ~is_echo
    batch.batch["rollout_index"] = torch.arange(len(batch)) // 3
    add_rollout_tokens(batch)


def with_advantage_in_two_rows(batch: DataProto) -> None:
    batch.batch["advantages"][2:] = 0


def with_a_broken_row(batch: DataProto) -> None:
    batch.batch["advantages"][1] = float("inf")


# Three processes divide neither the mini-batches nor seven rows; of four, some have no row of three, or none with a
# gradient. How a loss is averaged depends on neither.
ROLLOUT_MEAN = "rollout-mean-token-mean"
CASES = {
    **{
        mode: Case(PolicyObjective(MIXED.model_copy(update={"loss_agg_mode": mode})), (2,))
        for mode in LOSS_AGG_MODES
        if mode != ROLLOUT_MEAN
    },
    ROLLOUT_MEAN: Case(
        PolicyObjective(
            MIXED.model_copy(update={"loss_agg_mode": ROLLOUT_MEAN, "echo_coeff": 0.3})
        ),
        (2,),
        change=with_rollouts_of_three_rows,
    ),
    "several steps": Case(PLAIN, (2, 3), SEVERAL_STEPS),
    "several steps, in the order of the ranks": Case(
        PLAIN, (3,), replace(SEVERAL_STEPS, shuffle_seed=None), is_dealt=False
    ),
    "seven rows": Case(PLAIN, (3, 4), SEVERAL_STEPS, num_rows=7),
    "three rows": Case(PLAIN, (2, 4), Passes(2, 1, MICRO), num_rows=3),
    "no advantage": Case(PLAIN, (4,), SEVERAL_STEPS, change=without_advantage),
    "advantage on one rank": Case(
        PLAIN, (4,), num_rows=8, is_dealt=False, change=with_advantage_in_two_rows
    ),
    "critic": Case(ValueObjective(CriticConfig()), (3,), Passes(5, 1, MICRO, shuffle_seed=3)),
    "not finite": Case(PLAIN, (2, 4), change=with_a_broken_row),
}
WORK = {1: (1, 3), 2: (3,), 3: (1, 3), 4: (1,)}
"""By number of processes, the answers to each of three prompts that a worker gives: one answer each leaves one of four
processes without a row, three share a prompt among two."""
ASKED_BY = (1, 2, 4)
"""Numbers of processes that compute scores of three rows."""
SAVED_BY = (1, 2)
"""Numbers of processes that save a checkpoint."""


def make_engine(folder: Path, replicas: ProcessGroup, scorer: type = PolicyScorer) -> FSDPEngine:
    model = load_causal_lm(folder / "model", dtype=torch.float32, device=CPU)
    training = Training(OPTIMIZER, grad_clip=1e6, max_nonfinite_steps=2)
    processes = Processes.arrange(replicas, Layout(dp_replicate=replicas.size))
    return FSDPEngine(
        scorer(model), dtype=torch.float32, device=CPU, training=training, processes=processes
    )


def own_rows(batch: DataProto, case: Case, replicas: ProcessGroup) -> DataProto:
    """This rank's chunk of the case's rows."""
    rows = batch[: case.num_rows].select(deepcopy=True)
    case.change(rows)
    if case.is_dealt and replicas.size > 1:
        rows.batch["row_index"] = torch.arange(len(rows))
        rows.reorder(torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)))
    return rows.chunk(replicas.size)[replicas.rank]


def whole(part: DataProto, replicas: ProcessGroup) -> DataProto:
    """What the driver collects."""
    return DataProto.concat(replicas.gather(part))


def state_of(engine: FSDPEngine, replicas: ProcessGroup) -> dict[str, Any]:
    """Weights and the gradient's moving average, and whether all replicas have the same bits."""
    weights = {name: weight.clone() for name, weight in engine.weights()}
    moments = {
        name: engine.optimizer.adam.state[master]["exp_avg"].clone()
        for name, master in engine.parameters.masters.items()
        if engine.optimizer.adam.state.get(master)
    }
    others = replicas.gather((weights, moments))
    is_equal = all(
        same_bits(weights, other[0]) and same_bits(moments, other[1]) for other in others
    )
    return {"weights": weights, "moments": moments, "is_equal": is_equal}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def learn(engine: FSDPEngine, batch: DataProto, case: Case) -> dict[str, float]:
    """One update; the metrics of all ranks together."""
    rows = own_rows(batch, case, engine.replicas)
    metrics = update(engine, rows, case.objective, case.passes, lr=0.5, temperature=0.7)
    return reduce_metrics(
        whole(DataProto(meta_info={"metrics": metrics}), engine.replicas).meta_info["metrics"]
    )


def run_case(folder: Path, batch: DataProto, case: Case, replicas: ProcessGroup) -> dict[str, Any]:
    is_critic = isinstance(case.objective, ValueObjective)
    engine = make_engine(folder, replicas, ValueScorer if is_critic else PolicyScorer)
    metrics = learn(engine, batch, case)
    return {"metrics": metrics, **state_of(engine, replicas)}


def ask(folder: Path, batch: DataProto, replicas: ProcessGroup) -> dict[str, Tensor]:
    """Log-probs, entropies and values of three rows."""
    part = batch[:3].chunk(replicas.size)[replicas.rank]
    scores = infer(make_engine(folder, replicas), part, MICRO, temperature=0.7, with_entropy=True)
    values = infer(make_engine(folder, replicas, ValueScorer), part, MICRO)
    return dict(whole(DataProto.from_dict({**scores, **values}), replicas).batch.items())


def go_on(
    folder: Path, batch: DataProto, replicas: ProcessGroup, *, save: str = "", load: str = ""
) -> dict[str, Any]:
    """Two updates with a checkpoint between them, or the second of them from one."""
    engine, parts = make_engine(folder, replicas), frozenset({"model", "optimizer"})
    if load:
        load_state(folder / load, engine.state(parts), engine.world)
        engine.apply_loaded_state(parts)
    else:
        learn(engine, batch, CASES["several steps"])
        writer = StateWriter(engine.world)
        writer.start({folder / save: engine.state(parts)})
        writer.is_written(wait=True)
    learn(engine, batch, CASES["seven rows"])
    return state_of(engine, replicas)


def give_up(folder: Path, batch: DataProto, replicas: ProcessGroup) -> str:
    """Gradients that stay broken end the run on every rank alike."""
    engine = make_engine(folder, replicas)
    try:
        for _ in range(2):
            learn(engine, batch, CASES["not finite"])
    except EngineError as error:
        return str(error)
    return ""


def work(folder: Path, place: WorkerPlace, count: int) -> dict[str, Any]:
    """A step of the policy's worker from `count` answers to each of three prompts."""
    vocabulary = {f"w{number}": number for number in range(97)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w2"
    )
    role = {
        "ppo_mini_batch_size": 2,
        "fsdp_config": {"model_dtype": "float32"},
        "optim": {"eps": 1.0},
        "grad_clip": 1e6,
    }
    config = Config(
        data={"train_batch_size": 3, "max_prompt_length": 4, "max_response_length": 5},
        actor_rollout_ref={
            "model": {"path": str(folder / "model")},
            "actor": role,
            "rollout": {"n": count},
        },
        trainer={"device": "cpu"},
    )
    with placed(place):
        worker = ActorRolloutRefWorker(config, tokenizer)
    worker.init_model()
    input_ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3], [0, 4, 4, 4]])
    attention = (input_ids != 0).long()
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(0),
    }
    prompts = DataProto.from_dict(
        tensors, {"uid": ["a", "b", "c"]}, {"global_steps": 1, "total_training_steps": 9}
    )
    prompts = repeat_prompts(prompts, count).chunk(place.world_size)[place.rank]
    part = worker.generate_sequences(prompts)
    part.meta_info |= prompts.meta_info
    for scored in (worker.compute_log_prob(part), worker.compute_ref_log_prob(part)):
        del scored.meta_info["metrics"]
        part.union(scored)
    part.batch["advantages"] = (
        part.batch["response_mask"] * (part.batch["responses"][:, :1] - 48.0) / 48
    )
    metrics = worker.update_actor(part).meta_info.pop("metrics")
    worker.publish_weights(1)
    prompts.meta_info["do_sample"] = False
    part.batch["greedy"] = worker.generate_sequences(prompts).batch["responses"]
    part.meta_info["metrics"] = metrics
    collected = whole(part, worker.processes.replicas)
    worker.close()
    return {
        **dict(collected.batch.items()),
        "metrics": reduce_metrics(collected.meta_info["metrics"]),
    }


def joining_error(place: WorkerPlace) -> str:
    try:
        process_group.join(place, CPU)
    except EngineError as error:
        return str(error)
    return ""


def meet(folder: Path, place: WorkerPlace) -> dict[str, Any]:
    """All cases of one number of processes."""
    batch = DataProto.load_from_disk(folder / "batch")
    replicas = process_group.join(place, CPU)
    size = replicas.size
    results: dict[str, Any] = {
        name: run_case(folder, batch, case, replicas)
        for name, case in CASES.items()
        if size == 1 or size in case.sizes
    }
    if size in ASKED_BY:
        results["asked"] = ask(folder, batch, replicas)
    if size in SAVED_BY:
        results["undisturbed"] = go_on(folder, batch, replicas, save=f"by {size}")
    results["gave up"] = give_up(folder, batch, replicas)
    # The worker finds the group of the process, and leaves it open for the others in it.
    results |= {f"work {count}": work(folder, place, count) for count in WORK[size]}
    results["totals"] = replicas.totals(replicas.rank, 1)
    if size > 1:
        results["other shape"] = joining_error(WorkerPlace(place.rank, size + 1))
    process_group.leave(replicas)
    return results


def resume(folder: Path, place: WorkerPlace) -> dict[str, Any]:
    """Two processes go on from a checkpoint of one; the first alone from one of two. Then the second dies."""
    batch = DataProto.load_from_disk(folder / "batch")
    replicas = process_group.join(place, CPU)
    results = {"2 from 1": go_on(folder, batch, replicas, load="by 1")}
    try:
        replicas.require_alike("tensors", [torch.ones(3) * replicas.rank, torch.ones(2)])
    except EngineError as error:
        results["unlike"] = str(error)
    if not replicas.is_first:
        os._exit(0)
    try:
        replicas.add_up([torch.ones(4)])
    except PeerLostError as error:
        results["left alone"] = str(error)
    return results | {"1 from 2": go_on(folder, batch, ALONE, load="by 2")}


def main(rank: int, folder: Path, ports: Sequence[int]) -> None:
    """Ranks that a smaller number of processes does not need are done before the others."""
    process_group.BUCKET_BYTES = 20_000
    for size, port in zip((4, 3, 2), ports, strict=False):
        if rank < size:
            results = meet(folder, WorkerPlace(rank, size, master_port=port))
            if rank == 0:
                torch.save(results, folder / f"{size}.pt")
    if rank == 0:
        torch.save(meet(folder, WorkerPlace()), folder / "1.pt")
    if rank < 2:
        torch.save(
            resume(folder, WorkerPlace(rank, 2, master_port=ports[3])), folder / "resumed.pt"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), [int(port) for port in sys.argv[3:]])
