# SPDX-License-Identifier: Apache-2.0
"""Models of the roles: loading, and checks against the layouts and sequence lengths of a run."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from quadriga.config import Config, Layout, ModelShape, check_model
from quadriga.config.actor import VISION_TYPES
from quadriga.config.adapter import adapter_route
from quadriga.config.distillation import is_served
from quadriga.config.length_checks import too_long
from quadriga.config.placement import (
    ACTOR,
    CRITIC,
    DISTILLATION,
    arranged_roles,
    rollout_devices,
    rollout_group_size,
)
from quadriga.config.rollout import ROLLOUT
from quadriga.engines.fsdp.sharded import ReadWeight
from quadriga.engines.megatron.names import require_supported
from quadriga.engines.parallel.pipeline import layers_of_stage
from quadriga.engines.parallel.processes import Processes
from quadriga.errors import CheckpointError, ConfigError, EngineError
from quadriga.models.adapter_files import base_name, is_factor, open_model
from quadriga.models.architecture import (
    EXPERT_COUNTS,
    PACKED,
    choose_attention,
    length_limit,
    tensor_plan,
    way_of,
)
from quadriga.models.experts import mixtures, router_of
from quadriga.models.flops import model_cost
from quadriga.models.load import load_causal_lm, load_config, model_folder, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.reward_model import add_score_head, load_reward_model, require_scoring_model
from quadriga.models.scorers import PolicyScorer, RewardScorer, Scorer, ValueScorer
from quadriga.models.vision import ONE_TOKEN, is_vision, vision_encoder
from quadriga.models.weight_files import RenamedFiles
from quadriga.models.weight_names import ConvertedFiles, weight_buffers
from quadriga.observe.machine import choose_dtype
from quadriga.planning.module_sizes import module_sizes
from quadriga.planning.phases import RolePlan, describe_rollout, describe_update
from quadriga.workers.rollout_engines import rollout_engine_class

_VALUE_HEAD = re.compile(r"(?:value_head\.linear|v_head\.summary|score|classifier)\.(weight|bias)")
"""Names of a value head's weights in files of Quadriga, TRL, and transformers' token and sequence
classifiers. The group is `weight` or `bias`."""
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes that generate text."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with a head, and the source of the model's weights."""

    scorer: Scorer
    read: ReadWeight | None  # reads full weights; None: the scorer has its weights already


def load_policy(
    config: Config, dtype: torch.dtype, processes: Processes, *, has_adapter: bool = False
) -> LoadedModel:
    """Load the policy of `actor_rollout_ref.model`.

    Freezes the vision encoder if the configuration says so.

    Args:
        config: the configuration.
        dtype: dtype of replicated weights. Sharded weights are read later, shard by shard.
        processes: the ranks that will hold the model.
        has_adapter: whether to add the configured adapter, in float32.

    Returns:
        The policy, and the source of its weights.
    """
    section = config.actor_rollout_ref.model
    loaded = load_model(config, section.path, PolicyScorer, dtype, processes)
    model = loaded.scorer.model
    if config.actor_rollout_ref.actor.freeze_vision_tower:
        vision_encoder(model).requires_grad_(False)
    if not has_adapter:
        return loaded
    read_factor = add_adapter(model, section, config.trainer.seed)
    read_base = loaded.read
    # The scorer has its weights already, and the adapter's factors are initialized.
    if read_base is None:
        return loaded

    def read(name: str) -> torch.Tensor:
        """Read a factor of the adapter, or a weight of the model without an adapter."""
        return read_factor(name) if is_factor(name) else read_base(base_name(name))

    return LoadedModel(loaded.scorer, read)


def load_model(
    config: Config,
    path: str,
    scorer: type[Scorer],
    dtype: torch.dtype,
    processes: Processes,
    *,
    is_teacher: bool = False,
) -> LoadedModel:
    """Load the model at `path`, with the options of `actor_rollout_ref.model`.

    A value head is read from the files; if they have none, it is zero.

    Args:
        config: the configuration.
        path: folder or hub name.
        scorer: class of the scorer, which adds the head.
        dtype: dtype of replicated weights. Sharded weights are read later, shard by shard.
        processes: the ranks that will hold the model.
        is_teacher: whether to ignore `override_config`, which is for the policy.

    Returns:
        The model, and the source of its weights.

    Raises:
        EngineError: the files lack a weight, or their head has several labels.
    """
    model = config.actor_rollout_ref.model
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if not is_teacher:
        options["override_config"] = model.override_config
    is_critic = scorer is ValueScorer
    is_replicated = processes.layout.is_whole  # each rank holds all weights
    # Sharded weights are read from the folder, and so is a critic's value head. None: only
    # transformers can read the files, or the folder is not needed.
    folder = model_folder(path) if is_critic or not is_replicated else None
    # transformers loads all weights on every rank.
    if folder is None or is_replicated:
        causal_lm = load_causal_lm(
            path, dtype=dtype, device=processes.world.device, needs_head=not is_critic, **options
        )
        replicated = scorer(causal_lm)
        if is_critic and folder is not None:
            # transformers does not know the value head. If the files have none, it stays zero.
            files = _open_files(replicated, folder)
            head = replicated.model.get_submodule("value_head")
            for name, parameter in head.named_parameters("value_head"):
                if name in files.shapes:
                    parameter.data.copy_(files.read(name))
        return LoadedModel(replicated, None)

    loaded, missing = _read_by_shard(scorer(skeleton_causal_lm(folder, **options)), folder)
    # The value head of a critic may be missing, because a policy's files have none: it is zero.
    missing = [name for name in missing if not name.startswith("value_head.")]
    if missing:
        raise EngineError(
            f"model {path}",
            got=f"no weights for {len(missing)} parameters, first {missing[0]}",
            expected="all weights of the model, under the names that transformers gives them",
            fix="Load and save it once with transformers, or set fsdp_config.fsdp_size=1.",
        )
    return loaded


def load_reward_scorer(
    path: str, dtype: torch.dtype, processes: Processes, *, trust_remote_code: bool
) -> LoadedModel:
    """Load the reward model at `path`.

    Args:
        path: folder or hub name.
        dtype: dtype of replicated weights. Sharded weights are read later, shard by shard.
        processes: the ranks that will hold the model.
        trust_remote_code: whether to run code of the folder.

    Returns:
        The model and the source of its weights. If each rank holds all weights, or only
        transformers can read the files, the model has its weights already.

    Raises:
        EngineError: see `load_reward_model`.
    """
    folder = None if processes.layout.is_whole else model_folder(path)
    # Load all weights now, because each rank holds them, or only transformers can read the files.
    if folder is None:
        model = load_reward_model(
            path, dtype=dtype, device=processes.world.device, trust_remote_code=trust_remote_code
        )
        return LoadedModel(RewardScorer(model), None)
    has_vision = is_vision(load_config(folder, trust_remote_code=trust_remote_code))
    auto_class = None if has_vision else AutoModelForSequenceClassification
    skeleton = skeleton_causal_lm(
        folder, trust_remote_code=trust_remote_code, auto_class=auto_class
    )
    if has_vision:
        add_score_head(skeleton)
    # First check the model's class, because the scorer cannot be built without a head.
    require_scoring_model(path, skeleton, [])
    loaded, missing = _read_by_shard(RewardScorer(skeleton), folder)
    # Then check that the files have all weights.
    require_scoring_model(path, skeleton, missing)
    choose_attention(skeleton, trust_remote_code=trust_remote_code)
    return loaded


def _read_by_shard(skeleton: Scorer, folder: Path) -> tuple[LoadedModel, list[str]]:
    """Prepare a model whose weights are read from the files of a folder when they are sharded.

    Args:
        skeleton: the model on "meta".
        folder: folder with the files.

    Returns:
        The model with the source of its weights, and the names of weights that the files lack,
        which are read as zeros.
    """
    files = ConvertedFiles(_open_files(skeleton, folder), skeleton.model)
    names_in_files = files.shapes
    shapes = {name: parameter.shape for name, parameter in skeleton.model.named_parameters()}

    def read(name: str) -> torch.Tensor:
        """Read a full weight; zeros if the files lack it."""
        return files.read(name) if name in names_in_files else torch.zeros(shapes[name])

    # Buffers are not sharded: every rank reads them now.
    buffers = weight_buffers(skeleton.model)
    for name, buffer in buffers.items():
        if name in names_in_files:
            buffer.copy_(files.read(name))
    missing = [name for name in (*shapes, *buffers) if name not in names_in_files]
    return LoadedModel(skeleton, read), missing


def _open_files(scorer: Scorer, folder: Path) -> RenamedFiles:
    """Open the weights of a folder, under the names of the scorer's parameters.

    Only a critic needs this: its value head has another name in the files of each library.

    Args:
        scorer: the scorer that will have the weights.
        folder: folder with the files.

    Raises:
        EngineError: the value head has several labels.
    """

    def rename_head(name: str) -> str:
        """Translate the name of a weight in the files to the name in the scorer."""
        match = _VALUE_HEAD.fullmatch(name)
        is_value_head = match and isinstance(scorer, ValueScorer)
        return f"{scorer.head}.{match[1]}" if is_value_head else name

    files = RenamedFiles(open_model(folder), rename_head)
    # The first dimension of a head's weight. Files without a value head pass.
    num_labels = files.shapes.get(f"{ValueScorer.head}.weight", (1,))[0]
    if num_labels != 1:
        raise EngineError(
            f"critic {folder}",
            got=f"a head with {num_labels} labels",
            expected="one, the value",
            fix="Name a policy, a critic, or a classifier with one label.",
        )
    return files


def check_models(config: Config, *, has_critic: bool) -> None:
    """Check that the models fit the layouts and sequence lengths of the configuration.

    Args:
        config: the configuration.
        has_critic: whether the run has a critic.

    Raises:
        ConfigError: heads, layers or experts cannot be divided over the ranks; the policy has too
            few positions; a model is of the wrong kind, or is not supported by the training engine,
            the rollout engine or a key that is set.
    """
    policy = _model_config(config, ACTOR)
    path = config.actor_rollout_ref.model.path
    # A reward model is trained from a model of any kind, which gets a new head.
    if config.task != "reward_model":
        _require_causal_lm(policy, path)
    _check_vision(config, policy, has_critic=has_critic)
    policy_text = policy.get_text_config()
    positions = getattr(policy_text, "max_position_embeddings", None)
    num_tokens = config.data.max_prompt_length + config.data.max_response_length
    if positions is not None and num_tokens > positions:
        raise too_long(num_tokens, positions, str(path))
    _check_packing(config, policy, has_critic=has_critic)
    _check_routers(config, policy)
    _check_rollout_heads(config, policy_text)

    for where, layout, model in _arranged_models(config, has_critic=has_critic):
        # Does Megatron-core have this architecture?
        if layout.uses_megatron_modules:
            require_supported(model, layout, config.actor_rollout_ref.actor.megatron, where)
        # Do the ranks divide heads, layers and experts? With data parallelism alone, they need not.
        if (layout.sp, layout.tp, layout.pp, layout.ep) != (1, 1, 1, 1):
            model_text = model.get_text_config()
            num_heads, num_kv_heads = _num_heads(model_text)
            shape = ModelShape(
                name=(model.architectures or [type(model).__name__])[0],
                num_layers=model_text.num_hidden_layers,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                tensor_plan={} if layout.uses_megatron_modules else tensor_plan(model_text),
                num_experts=_num_experts(model_text),
            )
            check_model(layout, shape, where)


def _require_causal_lm(model: Any, path: str) -> None:
    """Check that a model generates text.

    Args:
        model: configuration of the model.
        path: folder or hub name of the model, for the error.

    Raises:
        ConfigError: the architectures in its config.json do not generate text.
    """
    # Without architectures, the model may be of any kind, which only loading it shows.
    names = model.architectures or []
    has_custom_code = "AutoModelForCausalLM" in getattr(model, "auto_map", {})
    if not names or has_custom_code or any(name.endswith(_GENERATING) for name in names):
        return
    raise ConfigError(
        "actor_rollout_ref.model.path",
        got=f"'{path}', whose config.json names {', '.join(names)}",
        expected="a causal language model, which generates text",
        fix="Name a model whose architecture ends in ForCausalLM.",
    )


def _check_rollout_heads(config: Config, text: Any) -> None:
    """Check that the rollout can divide the attention heads of the policy over its ranks.

    Args:
        config: the configuration.
        text: configuration of the policy's decoder.

    Raises:
        ConfigError: the ranks do not divide the heads, or ranks and key-value heads do not divide
            each other.
    """
    # Devices that compute one engine's steps together.
    size = rollout_group_size(config) * rollout_devices(config)
    num_heads, num_kv_heads = _num_heads(text)
    # With fewer key-value heads than ranks, each is repeated on several ranks.
    fits_kv_heads = num_kv_heads % size == 0 or size % num_kv_heads == 0
    if num_heads % size == 0 and fits_kv_heads:
        return
    raise ConfigError(
        f"{ROLLOUT}.tensor_model_parallel_size",
        got=f"{size}, for {num_heads} heads and {num_kv_heads} key-value heads",
        expected=f"a divisor of {num_heads} that also divides {num_kv_heads}, or is a multiple of "
        f"{num_kv_heads}",
        fix="Choose another size.",
    )


def _num_heads(text: Any) -> tuple[int, int]:
    """Numbers of attention heads and key-value heads of a decoder's configuration.

    A model without attention counts as one head.
    """
    num_heads = getattr(text, "num_attention_heads", 1)
    return num_heads, getattr(text, "num_key_value_heads", None) or num_heads


def _check_packing(config: Config, policy: Any, *, has_critic: bool) -> None:
    """Check that roles whose rows cannot be packed ask for nothing that needs packed rows.

    Args:
        config: the configuration.
        policy: the policy's configuration.
        has_critic: whether the run has a critic.

    Raises:
        ConfigError: rows of a role cannot be packed, but tensor, sequence or pipeline parallelism
            or the rollout engine needs that; or rows of the policy can be packed only if they are
            shorter than the configured lengths (longrope), and the rollout engine packs all.
    """
    rollout = rollout_engine_class(config)
    code = config.actor_rollout_ref.model.trust_remote_code
    for where, layout, model in _arranged_models(config, has_critic=has_critic):
        # Rows of a reward model are packed, whatever its architecture.
        way = PACKED if where == "reward_model" else way_of(model, trust_remote_code=code)
        # A way has a reason only if rows cannot be packed.
        if not way.reason:
            continue
        problem = f"for an architecture whose rows are computed one at a time ({way.reason})"
        if (layout.sp, layout.tp, layout.pp) != (1, 1, 1):
            raise ConfigError(
                where,
                got=f"{layout.describe()}, {problem}",
                expected="no other sizes than fsdp_size",
                fix="Shard the weights with fsdp_config.fsdp_size.",
            )
        if where == ACTOR and rollout.needs_packed_rows:
            raise ConfigError(
                f"{ROLLOUT}.name",
                got=f"{rollout.name}, {problem}",
                expected="an engine that knows its layers",
                fix="Set it to hf, or to vllm where it loads the model.",
            )

    # In sequences longer than this limit, the rotary position of every token depends on the length
    # of the sequence, so that packed rows would need different positions.
    limit = length_limit(policy)
    num_tokens = config.data.max_prompt_length + config.data.max_response_length
    if limit is not None and num_tokens > limit and rollout.needs_packed_rows:
        raise ConfigError(
            f"{ROLLOUT}.name",
            got=f"{rollout.name}, for sequences of up to {num_tokens} tokens of a model with "
            "rope_type=longrope",
            expected=f"at most {limit} tokens: beyond, positions depend on a sequence's length",
            fix="Set it to hf, or lower the lengths.",
        )


def sizes_of_models(config: Config, *, has_critic: bool) -> Iterator[str]:
    """Describe the trained models by their config.json: parameters, cost per token, memory.

    Args:
        config: the configuration.
        has_critic: whether the run has a critic.

    Yields:
        Lines to be printed.

    Raises:
        ConfigError: see `check_models`.
    """
    check_models(config, has_critic=has_critic)
    model = config.actor_rollout_ref.model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arranged = {
        where: layout for where, layout, _ in _arranged_models(config, has_critic=has_critic)
    }
    for where, section in ((ACTOR, config.actor_rollout_ref.actor), (CRITIC, config.critic)):
        layout = arranged.get(where)
        if layout is None:
            continue
        path, options = _path_and_options(config, where)
        # On "meta", where parameters have sizes, but no values.
        skeleton = skeleton_causal_lm(path, **options)
        is_adapted = model.has_adapter and where == ACTOR
        # The weights below an adapter get no gradients, which saves operations.
        cost = model_cost(skeleton.requires_grad_(not is_adapted))
        total = sum(parameter.numel() for parameter in skeleton.parameters())
        moe_layers = list(mixtures(skeleton))
        expert_parameters = [layer.experts.parameters() for layer in moe_layers]
        in_experts = sum(parameter.numel() for parameter in chain(*expert_parameters))
        text = f"{where}: {total / 1e6:.1f} M parameters"
        if moe_layers:
            counts = f"{router_of(moe_layers[0]).top_k} of {moe_layers[0].experts.num_experts}"
            counts += f" in each of {len(moe_layers)} layers"
            text += f", {in_experts / 1e6:.1f} M of them experts, {counts} for a token"
        # In a mixture of experts, only the experts that a token goes through count as active. The
        # FLOPs are those of a single token, which attends to no earlier token.
        num_active = cost.num_block_parameters + cost.num_head_parameters
        forward = cost.forward_flops(1, 1, 0) / 1e9
        update = cost.update_flops(1, 1, 0) / 1e9
        yield (
            f"{text}; {num_active / 1e6:.1f} M multiply it: {forward:.3g} GFLOP forward, "
            f"{update:.3g} in an update, attention aside"
        )
        dtype = choose_dtype(section.fsdp_config.model_dtype, device).value
        num_bytes = layout.state_bytes(
            in_experts, total - in_experts, dtype.itemsize, is_trained=not is_adapted
        )
        state = "weights, AdamW's moments and sums of gradients"
        if is_adapted:
            state = "frozen weights"  # those of an adapter are few
        yield (
            f"{where}: a process keeps about {num_bytes / 1e9:.3g} GB of {state} "
            f"({layout.describe()}, {str(dtype).removeprefix('torch.')})"
        )
        plan = RolePlan(module_sizes(skeleton), layout)
        yield f"{where}: {describe_update(config, where, plan)}"
        rollout_memory = describe_rollout(config, plan) if where == ACTOR else ""
        if rollout_memory:
            yield f"{ROLLOUT}: {rollout_memory}"


def check_checkpoint(config: Config, checkpoint: Path | None) -> None:
    """Refuse to resume a policy with another number of experts.

    Other differences, and damage, are found when the checkpoint is read.

    Args:
        config: the configuration.
        checkpoint: folder of the checkpoint to resume from; None: the run starts anew.

    Raises:
        CheckpointError: the numbers differ.
    """
    if checkpoint is None:
        return
    folder = checkpoint / "actor"
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # A vision-language model has its decoder's configuration in `text_config`.
        saved_experts = _num_experts(SimpleNamespace(**facts.get("text_config", facts)))
    # A file that is missing or damaged is reported when the checkpoint is read.
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return
    num_experts = _num_experts(_model_config(config, ACTOR).get_text_config())
    if saved_experts != num_experts:
        raise CheckpointError(
            str(folder),
            got=f"a model of {saved_experts} experts in a layer",
            expected=f"{num_experts}, as actor_rollout_ref.model.path has",
            fix="Resume with the model of the checkpoint.",
        )


def _num_experts(text: Any) -> int:
    """Number of experts per layer, of a decoder's configuration; 0 for a dense model."""
    # The key has another name in each architecture.
    counts = (getattr(text, name, None) for name in EXPERT_COUNTS)
    return next(filter(None, counts), 0)


def _check_routers(config: Config, policy: Any) -> None:
    """Check that keys for a mixture of experts are set only for such a policy, with packed rows.

    Args:
        config: the configuration.
        policy: the policy's configuration.

    Raises:
        ConfigError: such a key is set, but the policy has no experts, or its rows are not packed.
    """
    actor = config.actor_rollout_ref.actor
    num_ranks = config.actor_rollout_ref.rollout.expert_parallel_size
    fix = "Leave the key out."
    # Values that differ from the defaults and need experts, by key.
    values = {}
    if actor.router_aux_loss_coef:
        values[f"{ACTOR}.router_aux_loss_coef"] = actor.router_aux_loss_coef
    if actor.router_z_loss_coef:
        values[f"{ACTOR}.router_z_loss_coef"] = actor.router_z_loss_coef
    if actor.router_replay != "off":
        values[f"{ACTOR}.router_replay"] = actor.router_replay
    if num_ranks != 1:
        values[f"{ROLLOUT}.expert_parallel_size"] = num_ranks

    for key, value in values.items():
        if not _num_experts(policy.get_text_config()):
            got = f"{value}, with a model without experts ({policy.model_type})"
            raise ConfigError(key, got=got, expected="a mixture of experts", fix=fix)
        way = way_of(policy, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
        if way.attention != PACKED.attention:
            got = f"{value}, with {policy.model_type}, whose rows are computed one at a time"
            raise ConfigError(key, got=got, expected="a model whose rows are packed", fix=fix)


def _check_vision(config: Config, policy: Any, *, has_critic: bool) -> None:
    """Check that roles support a vision-language policy; for a text policy, that no key needs one.

    Args:
        config: the configuration.
        policy: the policy's configuration.
        has_critic: whether the run has a critic.

    Raises:
        ConfigError: a key or the model of another role does not fit the policy.
    """
    model = config.actor_rollout_ref.model
    actor = config.actor_rollout_ref.actor
    if not is_vision(policy):
        if actor.freeze_vision_tower:
            raise ConfigError(
                f"{ACTOR}.freeze_vision_tower",
                got=f"True, with a model without a vision encoder ({policy.model_type})",
                expected="a vision-language model",
                fix="Leave the key out.",
            )
        return
    if model.has_adapter and actor.freeze_vision_tower:
        raise ConfigError(
            f"{ACTOR}.freeze_vision_tower",
            got="True, with an adapter, which learns in the vision encoder, too",
            expected="False: with an adapter, all weights of the model itself are frozen anyway",
            fix="Leave the key out; actor_rollout_ref.model.exclude_modules='.*visual.*' keeps the "
            "adapter out of it.",
        )
    if model.has_adapter and adapter_route(config).is_alone:
        raise ConfigError(
            "actor_rollout_ref.model.lora_merge",
            got=f"{model.lora_merge}, with vllm and a vision-language model ({policy.model_type})",
            expected="true: vLLM is not asked to apply an adapter in a vision encoder",
            fix="Set it to true.",
        )
    sizes = config.data.mm_processor_kwargs.model_dump(
        include={"min_pixels", "max_pixels"}, exclude_none=True
    )
    rollout = rollout_engine_class(config)
    # For these types (GLM-4V), vLLM splits images by the sizes in the model's files, and ignores
    # the sizes of `data.mm_processor_kwargs`. Its attention layers always have biases.
    is_cut_by_rollout = policy.model_type in ONE_TOKEN and rollout.cuts_images
    if is_cut_by_rollout and (sizes or not policy.text_config.attention_bias):
        raise ConfigError(
            "data.mm_processor_kwargs" if sizes else "actor_rollout_ref.model.path",
            got=f"{sizes or 'attention_bias=false'}, with vllm and glm4v",
            expected="the model's sizes, and attention_bias=true",
            fix="Set them in the model's own files.",
        )
    if any(map(is_served, config.distillation.all_teachers)):
        raise ConfigError(
            "distillation",
            got="a server, with a vision-language policy",
            expected="a model's folder: servers get no images",
            fix="Let the run load the teacher.",
        )
    for where, layout, model in _arranged_models(config, has_critic=has_critic):
        _check_vision_of_role(where, layout, model, policy)


def _check_vision_of_role(where: str, layout: Layout, model: Any, policy: Any) -> None:
    """Check that the model of a role reads the images of a vision-language policy.

    Args:
        where: the section of the role.
        layout: layout of the role.
        model: configuration of the role's model.
        policy: configuration of the policy.

    Raises:
        ConfigError: the model reads no images, or others than the policy; or the first pipeline
            stage has fewer layers than images are added to.
    """
    if where == CRITIC and not is_vision(model):
        raise ConfigError(
            "critic.model.path",
            got="a text model, with a vision-language policy",
            expected=f"a vision-language model too: {', '.join(VISION_TYPES)}",
            fix="Leave the key out: the critic then starts from the policy's model.",
        )
    if where == "reward_model" and _image_inputs(model) != _image_inputs(policy):
        raise ConfigError(
            f"{where}.model.path",
            got=f"a model of type {model.model_type}, with a vision-language policy of type "
            f"{policy.model_type}",
            expected="a model with the same image tokens and patches",
            fix="Train one with `quadriga sft objective=reward_model`, or grade with "
            "custom_reward_function.path.",
        )
    if layout.pp == 1:
        return
    # Features of images are added to the outputs of the first layers. The first stage, with the
    # vision encoder, must have all of these layers.
    vision = getattr(model, "vision_config", None)
    num_needed = len(getattr(vision, "deepstack_visual_indexes", ()))
    first_stage = layers_of_stage(model.get_text_config().num_hidden_layers, 0, layout.pp)
    if num_needed > len(first_stage):
        raise ConfigError(
            where,
            got=f"{layout.describe()}, with {len(first_stage)} layers in the first stage "
            f"({model.model_type})",
            expected=f"at least {num_needed} there, because images are added to their outputs",
            fix="Lower pipeline_model_parallel_size.",
        )


def _image_inputs(model: Any) -> tuple[Any, ...]:
    """Image format of a model: its type, image tokens and patch sizes; () for a text model."""
    if not is_vision(model):
        return ()
    vision = model.vision_config
    tokens = (model.model_type, model.image_token_id, model.video_token_id)
    return (*tokens, vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)


def layout_tables(config: Config, *, has_critic: bool) -> Iterator[str]:
    """Describe the layout of each role with several ranks, with a table of its ranks."""
    # Roles that share a section also share the layout, which is shown once.
    shown = set()
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        if size > 1 and where not in shown:
            shown.add(where)
            layout = section.layout(size, where, config.actor_rollout_ref.actor.megatron_if_chosen)
            table = layout.table().replace("\n", "\n    ")
            yield f"  {where}: {layout.describe()}\n    {table}"


def _arranged_models(config: Config, *, has_critic: bool) -> Iterator[tuple[str, Layout, Any]]:
    """Yield key of the section, layout and model configuration of each role and each teacher."""
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        layout = section.layout(size, where, config.actor_rollout_ref.actor.megatron_if_chosen)
        if where != DISTILLATION:
            yield where, layout, _model_config(config, where)
            continue
        trusts = config.actor_rollout_ref.model.trust_remote_code
        for path in dict.fromkeys(config.distillation.loaded_teachers.values()):
            yield where, layout, load_config(path, trust_remote_code=trusts)


def _model_config(config: Config, where: str) -> Any:
    """Load the configuration of a role's model."""
    path, options = _path_and_options(config, where)
    return load_config(path, **options)


def _path_and_options(config: Config, where: str) -> tuple[str, dict[str, Any]]:
    """Path of a role's model, and the options with which transformers reads it."""
    model = config.actor_rollout_ref.model
    paths = {ACTOR: model.path, CRITIC: config.critic.model.path or model.path}
    path = paths.get(where, config.reward_model.model.path or "")
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    # The override is for the policy's model, from which a critic may start, too.
    if path == model.path:
        options["override_config"] = model.override_config
    return path, options
