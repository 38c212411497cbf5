# SPDX-License-Identifier: Apache-2.0
"""Base classes of the workers, and the columns of a batch that their methods read.

EngineWorker      a model in a training engine: device, ranks, engine, close
  Learner         a model that is trained: optimizer, update, metrics, checkpoint

The driver selects the columns of a call, so that no others are sent:

generate_sequences           PROMPT_TENSORS, PROMPT_OBJECTS; for conversations CONVERSATION_OBJECTS
compute_*                    MODEL_INPUTS, MODEL_OBJECTS
compute_rm_score             MODEL_INPUTS, and CHAT_OBJECTS if the reward model reads chats
update_actor, update_critic  MODEL_INPUTS, MODEL_OBJECTS, the fields of the objective, row_index, and
                             rollout_index if rollouts have several rows
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import ActorConfig, Config, CriticConfig, ModelConfig
from quadriga.config.actor import CriticModelConfig, FSDPConfig, ParallelConfig
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.engines import megatron, process_group
from quadriga.engines.batches import Passes
from quadriga.engines.checkpoint import CopyPlan, StateCopier, read_copy
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, Memory, Training
from quadriga.engines.objectives import (
    Objective,
    PolicyObjective,
    ValueObjective,
    add_rollout_tokens,
)
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.step import FirstOutputs, lr_at, update
from quadriga.errors import ConfigError
from quadriga.models.architecture import is_packed, way_of
from quadriga.models.experts import ROUTES
from quadriga.models.flops import peak_flops
from quadriga.models.probe import probe
from quadriga.models.weight_files import MODEL
from quadriga.observe.gpu_machine import (
    DRIVER,
    VISIBLE,
    require_machine,
    require_visible_devices,
    visible_devices,
)
from quadriga.observe.machine import GIB, Choice, choose_dtype, release_free_memory
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
from quadriga.workers.memory import MemoryChoice, choose_memory
from quadriga.workers.models import LoadedModel

# Models of one device share the measurement, and so do the runs of one process.
peak_flops_once = cache(peak_flops)
Pass = TypeVar("Pass", bound=Callable[..., DataProto])
MESH = "replicas"  # name of the mesh of data-parallel ranks
BY_REPLICA = make_nd_compute_dataproto_dispatch_fn(MESH)
"""A chunk of rows for each data-parallel rank. All ranks of a model-parallel group get the same
chunk, and one of them returns the result."""

GROUPS = "rollout groups"  # name of the mesh of rollout groups
BY_GROUP = make_nd_compute_dataproto_dispatch_fn(GROUPS)
"""A chunk of rows for each rollout group. All ranks of the group get the same chunk, and its leader
returns the result."""

COPIED = frozenset({MODEL, OPTIMIZER})
"""Parts of an engine's state that are copied after each step, from which a run can resume."""

PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")
PROMPT_OBJECTS = ("raw_prompt_ids", "uid", "sample_index", "multi_modal_data", "multi_modal_inputs")
CONVERSATION_OBJECTS = (
    "raw_prompt",
    "agent_name",
    "tools_kwargs",
    "interaction_kwargs",
    "reward_model",
    "extra_info",
    "index",
    "rollout_id",
)
CHAT_OBJECTS = ("raw_prompt", "uid")
SOLUTION_MESSAGES = "solution_messages"
MODEL_INPUTS = (*PROMPT_TENSORS, "response_mask")
MODEL_OBJECTS = ("multi_modal_inputs",)
# Share of a GPU's memory that other programs may hold without a warning. A CUDA context and the
# buffers of NCCL take 2 % of a GPU with 80 GB.
MOST_HELD_SHARE = 0.05


def driver_problem() -> ConfigError | None:
    """Find out whether torch cannot use the GPU driver of this machine.

    torch then reports that there is no GPU, and a run would compute on the CPU.

    Returns:
        The error to raise; None if torch can use the driver, or there is none.
    """
    if torch.version.cuda is None or torch.cuda.is_available() or not DRIVER.exists():
        return None
    # The user hides all GPUs.
    if visible_devices() == []:
        return None
    # The first line of this file names the driver and its version.
    lines = DRIVER.read_text(encoding="utf-8").splitlines()
    return ConfigError(
        "trainer.device",
        got=f"the driver of this machine ({lines[0].strip() if lines else 'unknown'}),"
        f" which torch {torch.__version__} for CUDA {torch.version.cuda} cannot use",
        expected="a driver that is new enough for torch",
        fix="Update the driver, install torch for an older CUDA, or set trainer.device=cpu.",
    )


def choose_device(wish: str, local_rank: int = 0) -> torch.device:
    """Choose the device of a worker. A GPU becomes the current device of the process.

    Args:
        wish: `auto` for an accelerator if there is one, `cuda` for the rank's GPU among the visible
            GPUs, or the name of a device.
        local_rank: index of the rank's GPU if several are visible.

    Raises:
        ConfigError: the device does not exist, or torch cannot use the driver.
    """
    if wish == "auto" or wish.startswith("cuda"):
        # Without a visible GPU, `auto` takes the CPU, while `cuda` is an error.
        if wish != "auto":
            require_visible_devices()
        # Raise even for `auto`, which would silently take the CPU beside an unusable GPU.
        if problem := driver_problem():
            raise problem
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    # Ray shows each process only its device; torchrun shows all devices.
    if wish == "cuda" and torch.cuda.device_count() > 1:
        wish = f"cuda:{local_rank}"
    try:
        device = torch.empty(0, device=wish).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            "trainer.device",
            got=f"{wish!r} ({reason})",
            expected="a device that torch can use here",
            fix="Set trainer.device=auto; `quadriga doctor` lists the devices.",
        ) from error
    # Triton, vLLM and NCCL use the current device, whatever device their tensors are on.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def warn_about_unequal_devices(world: process_group.ProcessGroup, device: torch.device) -> None:
    """Print a warning on the first rank if the ranks have different GPUs.

    Args:
        world: the ranks of a role.
        device: the GPU of this rank.
    """
    properties = torch.cuda.get_device_properties(device)
    kinds = world.gather(f"{properties.name} with {properties.total_memory / GIB:.0f} GiB")
    if world.is_first and len(set(kinds)) > 1:
        counts = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
        print(
            f"warning: the ranks have different GPUs ({', '.join(counts)}): the smallest one limits"
            " what fits, and the slowest one each step."
        )


class HeldMemory(NamedTuple):
    """Memory of a GPU in bytes: in total, held by torch's allocator in this process, and held by
    anything else, such as other programs, CUDA contexts and NCCL."""

    total_bytes: int
    process_bytes: int
    other_bytes: int


def held_memory(device: torch.device) -> HeldMemory:
    """Measure what holds the memory of a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    process_bytes = torch.cuda.memory_reserved(device)
    return HeldMemory(total, process_bytes, total - free - process_bytes)


@cache
def warn_about_other_programs(device: torch.device) -> None:
    """Print a warning if other programs hold much of a GPU. Call it before models are loaded.

    Warns once, even if several roles of this process use the GPU.

    Args:
        device: the GPU of this rank.
    """
    memory = held_memory(device)
    if memory.other_bytes > MOST_HELD_SHARE * memory.total_bytes:
        visible = os.environ.get(VISIBLE, "all")
        print(
            f"warning: other programs hold {memory.other_bytes / GIB:.1f} of"
            f" {memory.total_bytes / GIB:.1f} GiB of {device} ({VISIBLE}={visible}), so a run may"
            " not fit. `nvidia-smi` lists them."
        )


def timed(phase: str) -> Callable[[Pass], Pass]:
    """Decorator of a method that returns rows: add its duration as the metric `timing_s/PHASE`.

    The metric keeps the seconds of the slowest rank when the ranks' results are joined.

    Args:
        phase: name of the phase.
    """

    def decorate(method: Pass) -> Pass:
        @wraps(method)
        def measured(*args: Any, **kwargs: Any) -> DataProto:
            """Call the method, and add its time to the metrics of its result."""
            start = time.perf_counter()
            rows = method(*args, **kwargs)
            seconds = Metric(time.perf_counter() - start, "max")
            metrics = rows.meta_info.get("metrics", {})
            rows.meta_info["metrics"] = metrics | {f"timing_s/{phase}": seconds}
            return rows

        return cast(Pass, measured)

    return decorate


class EngineWorker(Worker):
    """A worker whose model is in a training engine, built by `init_model`.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the policy.
    """

    engine: FSDPEngine

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        # The user's modules register losses, engines and the like by name.
        import_external(config.actor_rollout_ref.model.external_lib)
        self.config = config
        self.tokenizer = tokenizer
        self.share_prompts = config.actor_rollout_ref.actor.use_prefix_sharing

    def join(self, sizes: ParallelConfig, fsdp: FSDPConfig, where: str) -> None:
        """Choose the device and the dtype, and join the process group of the role.

        Args:
            sizes: section with the sizes of tensor, sequence and pipeline parallelism.
            fsdp: section with the dtype.
            where: name of the role's section, for errors.
        """
        self.device: torch.device = choose_device(self.config.trainer.device, self.local_rank)
        check_tool(self.config.global_profiler.tool, self.device)
        megatron_settings = self.config.actor_rollout_ref.actor.megatron_if_chosen
        if self.device.type == "cuda":
            require_machine(self.local_world_size)
        # Megatron needs a process group even for a single process.
        needs_group = megatron_settings is not None
        world = process_group.join(self.place, self.device, also_alone=needs_group)
        if self.device.type == "cuda":
            warn_about_unequal_devices(world, self.device)
            warn_about_other_programs(self.device)
        layout = sizes.layout(world.size, where, megatron_settings)
        self.processes = Processes.arrange(world, layout)
        # Of each model-parallel group, which computes the same rows, one rank returns the result.
        rank_place = self.processes.place
        self.register_mesh(MESH, rank_place.dp_rank, rank_place.is_collected)
        self.dtype: Choice = choose_dtype(fsdp.model_dtype, self.device)

    def build_engine(
        self,
        loaded: LoadedModel,
        fsdp: FSDPConfig,
        *,
        name: str,
        section: ActorConfig | CriticConfig | None = None,
        model: ModelConfig | CriticModelConfig | None = None,
        recomputes: bool = False,
    ) -> FSDPEngine:
        """Build the training engine of a role.

        Args:
            loaded: the model, and the source of its weights.
            fsdp: section for sharding and offloading.
            name: name of the role in errors.
            section: section with optimizer settings; None for inference.
            model: section with memory settings of training; None for inference.
            recomputes: whether training recomputes activations (gradient checkpointing).

        Raises:
            EngineError: the model's outputs differ from those of transformers. Checked only if the
                role has a single process, and not with Megatron.
        """
        memory = Memory(
            gradient_checkpointing=recomputes,
            activation_offload=model is not None and model.enable_activation_offload,
            reshard_after_forward=fsdp.reshard_after_forward,
            offload_weights=fsdp.offload_policy,
        )
        training = None
        if section:
            training = Training(section.optim, section.grad_clip, section.max_nonfinite_steps)
        build = FSDPEngine
        megatron_settings = self.config.actor_rollout_ref.actor.megatron_if_chosen
        if megatron_settings is not None:
            build = partial(
                megatron.MegatronEngine,
                sequence_parallel=megatron_settings.sequence_parallel,
                virtual=megatron_settings.virtual_pipeline_model_parallel_size,
                settings=megatron_settings.override_transformer_config,
            )
        elif self.processes.world.size == 1:
            # The comparison needs all weights, which only a single process has.
            probe(loaded.scorer, name)
        return build(
            loaded.scorer,
            read=loaded.read,
            dtype=self.dtype.value,
            device=self.processes.world.device,
            processes=self.processes,
            training=training,
            memory=memory,
            name=name,
        )

    def build_frozen(
        self, loaded: LoadedModel, fsdp: FSDPConfig, name: str
    ) -> tuple[FSDPEngine, str]:
        """Build an engine for inference, offloaded between phases if `fsdp` says so.

        Args:
            loaded: the model, and the source of its weights.
            fsdp: section for sharding and offloading.
            name: name of the role in errors.

        Returns:
            The engine, and its description, to be printed.
        """
        engine = self.build_engine(loaded, fsdp, name=name)
        kinds = ["weights"] if fsdp.param_offload else []
        # Text that begins with a semicolon; "" without offload.
        offload_note = engine.offload_between_phases(kinds, self.config.trainer.offload_directory)
        facts = engine.describe()
        size = f"{facts['parameters'] / 1e6:.1f} M parameters"
        return engine, f"{size}, {facts['weights']} ({self.dtype.reason}){offload_note}"

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Leave the process group of the role."""
        process_group.leave(self.processes.world)


class Learner(EngineWorker):
    """A worker whose model is trained. `init_model` builds the engine and the loss.

    Attributes:
        section: `critic` of the configuration for the critic, else `actor_rollout_ref.actor`.
    """

    part = "actor"  # name of its folder in a checkpoint
    objective: Objective

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        is_critic = self.part == "critic"
        self.section = config.critic if is_critic else config.actor_rollout_ref.actor
        self._peak_flops: float | None = None

    def make_engine(
        self, loaded: LoadedModel, model: ModelConfig | CriticModelConfig | None, name: str
    ) -> dict[str, str]:
        """Build `engine` and its checkpoint.

        Args:
            loaded: the model, and the source of its weights.
            model: section with memory settings of training; None for inference.
            name: name of the role in errors.

        Returns:
            The predicted memory of the role, to be printed; empty on a CPU.

        Raises:
            ConfigError: the role does not fit on the device, and `trainer.check_memory` refuses it.
        """
        optimizer_section = self.section if model else None
        memory = MemoryChoice(recomputes=False)
        # Inference keeps no activations, so there is nothing to choose.
        if optimizer_section is not None:
            role = CRITIC if self.part == "critic" else ACTOR
            memory = choose_memory(
                self.config,
                role,
                loaded.scorer.model,
                self.processes.layout,
                self.dtype.value,
                self.device,
            )
        self.engine = self.build_engine(
            loaded,
            self.section.fsdp_config,
            name=name,
            section=optimizer_section,
            model=model,
            recomputes=memory.recomputes,
        )
        self.checkpoint = RoleCheckpoint(self.engine, self.tokenizer)
        return {f"memory of the {name}": memory.description} if memory.description else {}

    def offload_training(self, *, keeps_weights: bool = False) -> str:
        """Offload tensors between phases, as `fsdp_config` says.

        Args:
            keeps_weights: whether the weights stay on the device, because the rollout computes with
                them, too.

        Returns:
            Description to be printed: "", or text that starts with a semicolon.
        """
        fsdp = self.section.fsdp_config
        kinds = set()
        if fsdp.param_offload:
            kinds |= {"masters"} if keeps_weights else {"masters", "weights"}
        if fsdp.optimizer_offload:
            kinds.add("optimizer")
        # By default, gradients are freed on accelerators only, where memory is scarcer.
        frees_gradients = fsdp.grad_offload
        if frees_gradients is None:
            frees_gradients = self.device.type != "cpu"
        text = self.engine.offload_between_phases(
            kinds, self.config.trainer.offload_directory, frees_gradients=frees_gradients
        )
        # `host_memory` has the kinds of tensors that were really offloaded.
        if fsdp.param_offload and not self.engine.host_memory.keys() & {"masters", "weights"}:
            text += "; param_offload moves nothing: the rollout computes with these weights"
        if fsdp.offload_policy and self.device.type == "cpu":
            text += "; offload_policy changes nothing on a CPU, where weights and optimizer are"
        return text

    def describe(self, name: str) -> dict[str, str]:
        """Describe the automatic choices of the engine, with reasons, to be printed.

        Args:
            name: key under which the model's size, device and processes are returned.
        """
        facts = self.engine.describe()
        choices = {}
        masters = f"masters and optimizer in {self.section.optim.master_dtype}"
        if self.engine.adapter:
            choices["adapter"] = self.engine.adapter
            masters += ", of the adapter"
        if not is_packed(self.engine.model):
            way = way_of(self.engine.model.config)
            choices["rows"] = (
                f"one at a time, by the attention '{way.attention}' of transformers: {way.reason}. "
                "Each row is a separate micro-batch, and prompts are computed once per response"
            )
        size = f"{facts['parameters'] / 1e6:.1f} M parameters"
        choices[name] = f"{size} on {facts['device']}, {facts['processes']}"
        choices["weights"] = f"{facts['weights']} ({self.dtype.reason}); {masters}"
        return choices

    def learn(
        self,
        data: DataProto,
        rows_per_prompt: int,
        *,
        temperature: float = 1.0,
        first_outputs: FirstOutputs | None = None,
    ) -> DataProto:
        """Update the model on a batch.

        Args:
            data: the columns of `UpdateInputs`; `meta_info` has `global_steps` and
                `total_training_steps`.
            rows_per_prompt: rows of the batch for each prompt that `ppo_mini_batch_size` counts.
            temperature: sampling temperature, by which logits are divided.
            first_outputs: gets the outputs of each row's first forward pass.

        Returns:
            Metrics in `meta_info`. `perf/mfu/NAME` is a share of the device's measured peak.
        """
        start = time.perf_counter()
        step = data.meta_info["global_steps"]
        name = self.objective.name  # in the names of metrics, such as "actor"
        passes = Passes.of(self.section, rows_per_prompt, step, share_prompts=self.share_prompts)
        lr = lr_at(step, self.section.optim, data.meta_info["total_training_steps"])
        metrics = update(
            self.engine,
            data,
            self.objective,
            passes,
            lr=lr,
            temperature=temperature,
            first_outputs=first_outputs,
        )
        # The utilization (MFU) replaces the number of operations.
        num_flops = metrics.pop(f"perf/flops/{name}").value
        flops_per_s = num_flops / (time.perf_counter() - start)
        release_free_memory()
        # A device that was busy when its peak was measured may exceed the measured peak.
        measured_peak = self._peak_flops or peak_flops_once(self.device, self.dtype.value)
        self._peak_flops = max(measured_peak, flops_per_s)
        metrics[f"perf/mfu/{name}"] = Metric(flops_per_s / self._peak_flops)
        return DataProto(meta_info={"metrics": metrics})

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: Path) -> None:
        """Copy the model and its optimizer, and start to write the copies below `directory`."""
        contents = frozenset(self.section.checkpoint.save_contents)
        self.checkpoint.start(directory / self.part, contents)

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> dict[str, int]:
        """Sizes in bytes of the tensors that `save_checkpoint` writes, of all ranks together."""
        return self.checkpoint.sizes(frozenset(self.section.checkpoint.save_contents))

    @register(Dispatch.ONE_TO_ALL)
    def save_model(self, directory: Path) -> None:
        """Start to write the model as a Hugging Face folder, below `directory`."""
        self.checkpoint.start(directory, frozenset({"hf_model"}))

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether the checkpoint is complete on disk. With `wait`, waits until it is."""
        return self.checkpoint.writer.is_written(wait=wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Read the model and its optimizer from below `directory`."""
        contents = frozenset(self.section.checkpoint.load_contents)
        self.checkpoint.load(directory / self.part, contents)

    @register(Dispatch.ONE_TO_ALL)
    def plan_copies(self) -> CopyPlan | None:
        """Plan the copies that are made after each step, of the model and its optimizer.

        Returns:
            On rank 0 the plan of all ranks, else None.
        """
        with self.engine.awake(*ALL_KINDS):
            self.copier = StateCopier(self.engine.state(COPIED), self.engine.world)
        return self.copier.plan if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def open_copies(self, paths: Sequence[str]) -> str:
        """Open the shared memory into which `copy_state` copies this rank's part of the state.

        The driver has made the memory as a file for each rank, because it outlives the rank.

        Args:
            paths: path of each rank's file.

        Returns:
            "" if the file was opened, else the error. It is not raised, because the run then goes
            on without copies.
        """
        try:
            self.copier.open(paths[self.rank])
        except OSError as error:
            return str(error)
        return ""

    @register(Dispatch.ONE_TO_ALL)
    def copy_state(self, step: int) -> None:
        """Start to copy the model and its optimizer after a step, in the background."""
        offloaded = self.engine.offloaded
        # `on_host` returns the host's copy of a tensor that is offloaded. The engine waits for
        # `copying` before it changes or offloads tensors.
        offloaded.copying = self.copier.start(step, offloaded.on_host)

    @register(Dispatch.ONE_TO_ALL)
    def load_copy(self, plan: CopyPlan, read: Callable[[int, int, int], Any]) -> None:
        """Load the model and its optimizer from the copies of all ranks; see `read_copy`.

        Args:
            plan: the plan by which the copies were made.
            read: called with a rank, a first byte and a number of bytes; returns these bytes of the
                rank's copy.
        """
        with self.engine.awake(*ALL_KINDS):
            read_copy(plan, read, self.engine.state(COPIED))
            self.engine.apply_loaded_state(COPIED)


def model_inputs(
    batch: DataProto, objects: Sequence[str] = MODEL_OBJECTS, *, with_routes: bool = False
) -> DataProto:
    """Select the columns that a method without gradients (`compute_*`) reads.

    Args:
        batch: rows with `MODEL_INPUTS`.
        objects: object columns, selected where they exist.
        with_routes: whether to select the experts of each token, if the rollout reported them.
    """
    columns = list(MODEL_INPUTS)
    if with_routes and ROUTES in batch.batch.keys():
        columns.append(ROUTES)
    return batch.select(columns, [key for key in objects if key in batch.non_tensor_batch])


class UpdateInputs:
    """Selects the columns that updates read, which depend on the configured losses.

    Args:
        config: the configuration.
    """

    def __init__(self, config: Config) -> None:
        self._policy = PolicyObjective(
            config.actor_rollout_ref.actor,
            config.algorithm.rollout_correction,
            config.distillation,
        )
        self._value = ValueObjective(config.critic)

    def select(self, batch: DataProto, role: Literal["actor", "critic"]) -> DataProto:
        """Select the columns for `update_actor` or `update_critic`.

        Args:
            batch: all rows. The policy loss adds columns that it computes from the whole batch.
            role: the role that is updated.
        """
        objective = self._policy if role == "actor" else self._value
        if objective.config.loss_agg_mode == "rollout-mean-token-mean":
            add_rollout_tokens(batch)
        if role == "actor":
            # Workers see only their chunks, so columns of the whole batch are computed here.
            self._policy.add_batch_columns(batch)
        # A dictionary, because an objective may read columns that are also inputs of the model.
        columns = dict.fromkeys([*MODEL_INPUTS, *objective.fields(batch)])
        for name in ("row_index", "rollout_index"):
            if name in batch.batch.keys():
                columns[name] = None
        objects = [key for key in MODEL_OBJECTS if key in batch.non_tensor_batch]
        return batch.select(list(columns), objects)
