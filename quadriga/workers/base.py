# SPDX-License-Identifier: Apache-2.0
"""What the workers of all roles do alike, and the columns of a batch that their calls read.

EngineWorker      a model in a training engine: device, ranks, engine, close
  Learner         it learns: optimizer, update, metrics, checkpoint

Columns are selected on the driver, so that nothing else travels:

generate_sequences           PROMPT_TENSORS, PROMPT_OBJECTS; with rollout.mode=async CONVERSATION_OBJECTS as well
compute_*                    MODEL_INPUTS, MODEL_OBJECTS
compute_rm_score             MODEL_INPUTS, and the chats where the reward model reads them
update_actor, update_critic  MODEL_INPUTS, MODEL_OBJECTS, the fields of the objective, and the numbers of the rows
"""

import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import ActorConfig, Config, CriticConfig, ModelConfig
from quadriga.config.actor import CriticModelConfig, FSDPConfig, ParallelConfig
from quadriga.engines import megatron, process_group
from quadriga.engines.batches import Passes
from quadriga.engines.checkpoint import CopyPlan, StateCopier, read_copy
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, Memory, Training
from quadriga.engines.objectives import Objective, PolicyObjective, ValueObjective
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.step import lr_at, update
from quadriga.errors import ConfigError
from quadriga.models.architecture import is_packed, way_of
from quadriga.models.experts import ROUTES
from quadriga.models.flops import peak_flops
from quadriga.models.probe import probe
from quadriga.models.weight_files import MODEL
from quadriga.observe.machine import Choice, choose_dtype, release_free_memory
from quadriga.observe.metrics import Metric
from quadriga.observe.profiler import check_tool
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.user_file import import_external
from quadriga.workers.checkpoint import OPTIMIZER, RoleCheckpoint
from quadriga.workers.models import LoadedModel

Pass = TypeVar("Pass", bound=Callable[..., DataProto])
MESH = "replicas"  # the name under which a worker registers its place among the data-parallel ranks
BY_REPLICA = make_nd_compute_dataproto_dispatch_fn(MESH)
"""A chunk of rows for each data-parallel rank, the same for all ranks of its model-parallel group; one of them
returns the result."""

GROUPS = (
    "rollout groups"  # the name under which a worker registers its place among the rollout groups
)
BY_GROUP = make_nd_compute_dataproto_dispatch_fn(GROUPS)
"""A chunk of rows for each rollout group, the same for all of its ranks; the leader returns the result."""

COPIED = frozenset({MODEL, OPTIMIZER})
"""What of an engine's state is copied after each step: all that a checkpoint can have."""

PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")
PROMPT_OBJECTS = ("raw_prompt_ids", "uid", "sample_index", "multi_modal_data", "multi_modal_inputs")
CONVERSATION_OBJECTS = (
    "raw_prompt", "agent_name", "tools_kwargs", "interaction_kwargs", "reward_model", "extra_info", "index",
)  # fmt: skip
CHAT_OBJECTS = ("raw_prompt", "uid")
SOLUTION_MESSAGES = "solution_messages"
MODEL_INPUTS = (*PROMPT_TENSORS, "response_mask")
MODEL_OBJECTS = ("multi_modal_inputs",)


def choose_device(wish: str, local_rank: int = 0) -> torch.device:
    """The device of a worker: `auto` is the accelerator where there is one, `cuda` the rank's own of those it sees.
    A GPU becomes the current device of the process. Raises ConfigError: there is no such device here."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    # Ray shows a process one device, its own; torchrun and the like show all to each.
    if wish == "cuda" and torch.cuda.device_count() > 1:
        wish = f"cuda:{local_rank}"
    try:
        device = torch.empty(0, device=wish).device
    except (RuntimeError, AssertionError) as error:
        got = f"{wish!r} ({str(error).strip().partition(chr(10))[0]})"
        fix = "Set trainer.device=auto; `quadriga doctor` says what there is."
        raise ConfigError(
            "trainer.device", got=got, expected="a device that torch can use here", fix=fix
        ) from error
    if (
        device.type == "cuda"
    ):  # where Triton, vLLM and NCCL work, whatever device their tensors are on
        torch.cuda.set_device(device)
    return device


def timed(phase: str) -> Callable[[Pass], Pass]:
    """Decorator of a worker's method that returns rows: `timing_s/PHASE`, its seconds on the slowest rank, go along."""

    def decorate(method: Pass) -> Pass:
        @wraps(method)
        def measured(*args: Any, **kwargs: Any) -> DataProto:
            start = time.perf_counter()
            rows = method(*args, **kwargs)
            metric = Metric(time.perf_counter() - start, "max")
            rows.meta_info["metrics"] = {
                **rows.meta_info.get("metrics", {}),
                f"timing_s/{phase}": metric,
            }
            return rows

        return cast(Pass, measured)

    return decorate


class EngineWorker(Worker):
    """A worker whose model is in a training engine, which `init_model` makes."""

    engine: FSDPEngine

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        import_external(config.actor_rollout_ref.model.external_lib)
        self.config, self.tokenizer = config, tokenizer
        self.share_prompts = config.actor_rollout_ref.actor.use_prefix_sharing

    def join(self, sizes: ParallelConfig, fsdp: FSDPConfig, where: str) -> None:
        """Choose the device and the dtype, and join the process group of the role. `sizes` are those of tensor,
        sequence and pipeline parallelism; `where` is the section, for errors."""
        self.device: torch.device = choose_device(self.config.trainer.device, self.local_rank)
        check_tool(self.config.global_profiler.tool, self.device)
        own = self.config.actor_rollout_ref.actor.megatron_if_chosen
        world = process_group.join(self.place, self.device, also_alone=own is not None)
        self.processes = Processes.arrange(world, sizes.layout(world.size, where, own))
        self.register_mesh(MESH, self.processes.place.dp_rank, self.processes.place.is_collected)
        self.dtype: Choice = choose_dtype(fsdp.model_dtype, self.device)

    def build_engine(
        self,
        loaded: LoadedModel,
        fsdp: FSDPConfig,
        *,
        name: str,
        section: ActorConfig | CriticConfig | None = None,
        model: ModelConfig | CriticModelConfig | None = None,
    ) -> FSDPEngine:
        """The training engine of a role, named `name` in errors; without `section` and `model` it is for inference.
        Raises EngineError: one process has the whole model, and computes other numbers with it than transformers."""
        options: dict[str, Any] = {
            "read": loaded.read,
            "dtype": self.dtype.value,
            "device": self.processes.world.device,
            "processes": self.processes,
            "training": Training(section.optim, section.grad_clip, section.max_nonfinite_steps)
            if section
            else None,
            "memory": Memory(
                gradient_checkpointing=model is not None and model.enable_gradient_checkpointing,
                activation_offload=model is not None and model.enable_activation_offload,
                reshard_after_forward=fsdp.reshard_after_forward,
                offload_weights=fsdp.offload_policy,
            ),
            "name": name,
        }
        if (own := self.config.actor_rollout_ref.actor.megatron_if_chosen) is None:
            if self.processes.world.size == 1:
                probe(loaded.scorer, name)
            return FSDPEngine(loaded.scorer, **options)
        return megatron.MegatronEngine(
            loaded.scorer,
            sequence_parallel=own.sequence_parallel,
            virtual=own.virtual_pipeline_model_parallel_size,
            settings=own.override_transformer_config,
            **options,
        )

    def build_frozen(
        self, loaded: LoadedModel, fsdp: FSDPConfig, name: str
    ) -> tuple[FSDPEngine, str]:
        """An engine for inference alone, whose weights rest where `fsdp` says so; and what it is, to be printed."""
        engine = self.build_engine(loaded, fsdp, name=name)
        kinds = ["weights"] if fsdp.param_offload else []
        rests, said = (
            engine.rest_between_phases(kinds, self.config.trainer.offload_directory),
            engine.describe(),
        )
        return (
            engine,
            f"{said['parameters'] / 1e6:.1f} M parameters, {said['weights']} ({self.dtype.reason}){rests}",
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Leave the process group of the role."""
        process_group.leave(self.processes.world)


class Learner(EngineWorker):
    """A worker whose model learns. `init_model` makes its loss, and its part of a checkpoint."""

    part = "actor"  # the name of its folder in a checkpoint
    objective: Objective

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        is_critic = self.part == "critic"
        self.section: ActorConfig | CriticConfig = (
            config.critic if is_critic else config.actor_rollout_ref.actor
        )
        self._peak_flops: float | None = None

    def make_engine(
        self, loaded: LoadedModel, model: ModelConfig | CriticModelConfig | None, name: str
    ) -> None:
        """Put the model into `engine`; without its section `model` it is for inference only."""
        section = self.section if model else None
        self.engine = self.build_engine(
            loaded, self.section.fsdp_config, name=name, section=section, model=model
        )
        self.checkpoint = RoleCheckpoint(self.engine, self.engine.model, self.tokenizer)

    def offload_training(self, *, keeps_weights: bool = False) -> str:
        """Let rest between phases what `fsdp_config` says. Returns what does, behind a semicolon, to be printed.
        `keeps_weights`: another role computes with these weights."""
        fsdp = self.section.fsdp_config
        kinds = (
            {"masters", *(() if keeps_weights else ("weights",))} if fsdp.param_offload else set()
        )
        kinds |= {"optimizer"} if fsdp.optimizer_offload else set()
        frees = fsdp.grad_offload if fsdp.grad_offload is not None else self.device.type != "cpu"
        text = self.engine.rest_between_phases(
            kinds, self.config.trainer.offload_directory, frees_gradients=frees
        )
        if fsdp.param_offload and not self.engine.resting.keys() & {"masters", "weights"}:
            text += "; param_offload moves nothing: the rollout computes with these weights"
        if fsdp.offload_policy and self.device.type == "cpu":
            text += (
                "; offload_policy changes nothing on a CPU: weights are, and steps are taken, there"
            )
        return text

    def describe(self, name: str, *, has_adapter: bool) -> dict[str, str]:
        """The engine's automatic choices with their reasons, for people to read."""
        chosen = self.engine.describe()
        adapter = {"adapter": self.engine.adapter} if has_adapter else {}
        masters = f"masters and optimizer in {self.section.optim.master_dtype}"
        masters += ", of the adapter" if has_adapter else ""
        if not is_packed(self.engine.model):
            way = way_of(self.engine.model.config)
            adapter["rows"] = (
                f"one at a time, by the attention '{way.attention}' of transformers: {way.reason}. Each row is a "
                "micro-batch of its own, and prompts are computed once for each of their responses"
            )
        return adapter | {
            name: f"{chosen['parameters'] / 1e6:.1f} M parameters on {chosen['device']}, {chosen['processes']}",
            "weights": f"{chosen['weights']} ({self.dtype.reason}); {masters}",
        }

    def learn(
        self, data: DataProto, rows_per_prompt: int, *, temperature: float = 1.0
    ) -> DataProto:
        """Update the model on a batch.

        Args:
            data: the columns of `UpdateInputs`; `meta_info` has `global_steps` and `total_training_steps`.
            rows_per_prompt: rows of the batch for each prompt that `ppo_mini_batch_size` counts.
            temperature: sampling temperature, by which logits are divided.

        Returns metrics in `meta_info`; `perf/mfu/NAME` is the share of the device's measured peak that was reached."""
        start, step, name = time.perf_counter(), data.meta_info["global_steps"], self.objective.name
        metrics = update(
            self.engine,
            data,
            self.objective,
            Passes.of(self.section, rows_per_prompt, step, share_prompts=self.share_prompts),
            lr=lr_at(step, self.section.optim, data.meta_info["total_training_steps"]),
            temperature=temperature,
        )
        rate = metrics.pop(f"perf/flops/{name}").value / (time.perf_counter() - start)
        release_free_memory()
        # Measured once; where that was at a busy moment, a rate that an update reaches raises it.
        self._peak_flops = max(self._peak_flops or peak_flops(self.device, self.dtype.value), rate)
        return DataProto(
            meta_info={"metrics": metrics | {f"perf/mfu/{name}": Metric(rate / self._peak_flops)}}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: Path) -> None:
        """Copy the model and its optimizer, and begin to write them below `directory`."""
        self.checkpoint.start(
            directory / self.part, frozenset(self.section.checkpoint.save_contents)
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, directory: Path) -> None:
        """Begin to write the model as an ordinary Hugging Face folder, below `directory`."""
        self.checkpoint.start(directory, frozenset({"hf_model"}))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether what was begun is on disk; with `wait`, it is when this returns."""
        return self.checkpoint.writer.is_written(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Read the model and its optimizer from below `directory`."""
        self.checkpoint.load(
            directory / self.part, frozenset(self.section.checkpoint.load_contents)
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plan_copies(self) -> CopyPlan | None:
        """How the ranks copy the model and its optimizer; from rank 0."""
        with self.engine.awake(*ALL_KINDS):
            self.copier = StateCopier(self.engine.state(COPIED), self.engine.world)
        return self.copier.plan if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_copies(self, paths: Sequence[str]) -> str:
        """Open the memory of this rank, one of those of all ranks. Returns why it cannot be; empty if it can."""
        try:
            self.copier.open(paths[self.rank])
        except OSError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def copy_state(self, step: int) -> None:
        """Begin to copy the model and its optimizer as they are after this step."""
        with self.engine.awake(*ALL_KINDS):  # where something rests, until it is copied
            self.engine.copying = self.copier.start(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_copy(self, plan: CopyPlan, read: Callable[[int, int, int], Any]) -> None:
        """Read the model and its optimizer from a copy; see `read_copy`."""
        with self.engine.awake(*ALL_KINDS):
            read_copy(plan, read, self.engine.state(COPIED))
            self.engine.state_was_loaded(COPIED)


def model_inputs(
    batch: DataProto, objects: Sequence[str] = MODEL_OBJECTS, *, with_routes: bool = False
) -> DataProto:
    """What a pass without gradients reads: `MODEL_INPUTS`, those of the objects that are there, and `with_routes` the
    experts of each token, where the rollout reported them."""
    routes = {ROUTES} & set(batch.batch.keys()) if with_routes else ()
    return batch.select(
        [*MODEL_INPUTS, *routes], [key for key in objects if key in batch.non_tensor_batch]
    )


class UpdateInputs:
    """The columns that the updates read, by the losses that the configuration chooses."""

    def __init__(self, config: Config) -> None:
        actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
        self._policy = PolicyObjective(actor, correction, config.distillation)
        self._value = ValueObjective(config.critic)

    def select(self, batch: DataProto, role: Literal["actor", "critic"]) -> DataProto:
        """Columns for `update_actor` or `update_critic`; what the policy loss makes of the whole batch is added."""
        if role == "actor":
            self._policy.add_batch_columns(batch)
        fields = (self._policy if role == "actor" else self._value).fields(batch)
        names = dict.fromkeys((*MODEL_INPUTS, *fields, *({"row_index"} & set(batch.batch.keys()))))
        return batch.select(
            list(names), [key for key in MODEL_OBJECTS if key in batch.non_tensor_batch]
        )
