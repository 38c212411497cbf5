# SPDX-License-Identifier: Apache-2.0
"""The models of the roles: whether they fit the ranks and the sequences, and how they are loaded."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from quadriga.config import Config, Layout, ModelShape, check_model
from quadriga.config.actor import VISION_TYPES
from quadriga.config.adapter import adapter_route
from quadriga.config.distillation import is_served
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
from quadriga.engines.megatron.names import require_known
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
from quadriga.models.reward_model import add_score, load_reward_model, require_judge
from quadriga.models.scorers import PolicyScorer, RewardScorer, Scorer, ValueScorer
from quadriga.models.vision import ONE_TOKEN, is_vision, vision_encoder
from quadriga.models.weight_files import RenamedFiles
from quadriga.models.weight_names import ConvertedFiles, weight_buffers
from quadriga.observe.machine import choose_dtype
from quadriga.workers.rollout_engines import ENGINES

_VALUE_HEAD = re.compile(r"(?:value_head\.linear|v_head\.summary|score|classifier)\.(weight|bias)")
"""A value head of ours, of TRL, and of transformers' classifiers of tokens and of sequences."""
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class LoadedModel:
    """A scorer, and where its parameters' values come from: None where it has them."""

    scorer: Scorer
    read: ReadWeight | None


def load_policy(
    config: Config, dtype: torch.dtype, processes: Processes, *, has_adapter: bool = False
) -> LoadedModel:
    """The model of `actor_rollout_ref.model` as a policy, for the ranks that will hold it; a vision encoder that the
    configuration freezes is frozen, and the adapter of the configuration is in float32. `dtype`: of replicated weights;
    sharded ones are read when they are cut."""
    section = config.actor_rollout_ref.model
    loaded = load_model(config, section.path, PolicyScorer, dtype, processes)
    if config.actor_rollout_ref.actor.freeze_vision_tower:
        vision_encoder(loaded.scorer.model).requires_grad_(False)
    if not has_adapter:
        return loaded
    read_factor, read_base = (
        add_adapter(loaded.scorer.model, section, config.trainer.seed),
        loaded.read,
    )
    if read_base is None:
        return loaded
    return LoadedModel(
        loaded.scorer,
        lambda name: read_factor(name) if is_factor(name) else read_base(base_name(name)),
    )


def load_model(
    config: Config,
    path: str,
    scorer: type[Scorer],
    dtype: torch.dtype,
    processes: Processes,
    *,
    is_teacher: bool = False,
) -> LoadedModel:
    """The model at `path` with a head, and the options of `actor_rollout_ref.model`, of which a teacher has none that
    change the model; a value head is that of the files, zero where they have none. `dtype` is that of replicated
    weights; sharded ones are read when they are cut.
    Raises EngineError: the files lack a weight, or their head gives a token several numbers."""
    model = config.actor_rollout_ref.model
    overrides = {} if is_teacher else {"override_config": model.override_config}
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, **overrides}
    is_critic = scorer is ValueScorer
    folder = model_folder(path) if is_critic or not processes.layout.is_whole else None
    if folder is None or processes.layout.is_whole:
        how = {"dtype": dtype, "device": processes.world.device, "needs_head": not is_critic}
        whole = scorer(load_causal_lm(path, **how, **options))
        if is_critic and folder is not None:
            files = _files(whole, folder)
            for name, parameter in whole.model.get_submodule("value_head").named_parameters(
                "value_head"
            ):
                if name in files.shapes:
                    parameter.data.copy_(files.read(name))
        return LoadedModel(whole, None)
    loaded, missing = _read_when_cut(scorer(skeleton_causal_lm(folder, **options)), folder)
    missing = [name for name in missing if not name.startswith("value_head.")]
    if missing:
        got = f"no weights for {len(missing)} parameters, first {missing[0]}"
        expected = "all weights of the model, under the names that transformers gives them"
        fix = "Load and save it once with transformers, or set fsdp_config.fsdp_size=1."
        raise EngineError(f"model {path}", got=got, expected=expected, fix=fix)
    return loaded


def load_judge(
    path: str, dtype: torch.dtype, processes: Processes, *, trust_remote_code: bool
) -> LoadedModel:
    """The reward model at `path`; sharded weights are read when they are cut. EngineError: as `load_reward_model`."""
    folder = None if processes.layout.is_whole else model_folder(path)
    if folder is None:
        how = {"device": processes.world.device, "trust_remote_code": trust_remote_code}
        return LoadedModel(RewardScorer(load_reward_model(path, dtype=dtype, **how)), None)
    sees = is_vision(load_config(folder, trust_remote_code=trust_remote_code))
    kind = None if sees else AutoModelForSequenceClassification
    skeleton = skeleton_causal_lm(folder, trust_remote_code=trust_remote_code, auto_class=kind)
    if sees:
        add_score(skeleton)
    require_judge(path, skeleton, [])
    loaded, missing = _read_when_cut(RewardScorer(skeleton), folder)
    require_judge(path, skeleton, missing)
    choose_attention(skeleton)
    return loaded


def _read_when_cut(skeleton: Scorer, folder: Path) -> tuple[LoadedModel, list[str]]:
    """A model whose weights are read from the files of a folder, and the names that these lack: they are zero."""
    files, buffers = (
        ConvertedFiles(_files(skeleton, folder), skeleton.model),
        weight_buffers(skeleton.model),
    )
    names, shapes = (
        files.shapes,
        {name: one.shape for name, one in skeleton.model.named_parameters()},
    )
    loaded = LoadedModel(
        skeleton, lambda name: files.read(name) if name in names else torch.zeros(shapes[name])
    )
    for name, buffer in buffers.items():
        if name in names:
            buffer.copy_(files.read(name))
    return loaded, [name for name in (*shapes, *buffers) if name not in names]


def _files(scorer: Scorer, folder: Path) -> RenamedFiles:
    """The weights of a folder, a critic's value head under our names. Raises EngineError: as `load_model`."""

    def own_name(name: str) -> str:
        head = _VALUE_HEAD.fullmatch(name) if isinstance(scorer, ValueScorer) else None
        return f"{scorer.head}.{head[1]}" if head else name

    files = RenamedFiles(open_model(folder), own_name)
    if (size := files.shapes.get(f"{ValueScorer.head}.weight", (1,))[0]) != 1:
        expected, fix = "one, the value", "Name a policy, a critic, or a classifier with one label."
        raise EngineError(
            f"critic {folder}", got=f"a head with {size} labels", expected=expected, fix=fix
        )
    return files


def check_models(config: Config, *, has_critic: bool) -> None:
    """ConfigError: heads or layers that cannot be divided over the ranks, or policies with too few positions."""
    policy = _model_config(config, ACTOR)
    names, own = policy.architectures or [], getattr(policy, "auto_map", {})
    generates = (
        not names
        or "AutoModelForCausalLM" in own
        or any(name.endswith(_GENERATING) for name in names)
    )
    if not generates and config.task != "reward_model":
        got = f"'{config.actor_rollout_ref.model.path}', whose config.json names {', '.join(names)}"
        fix = "Name a model whose architecture ends in ForCausalLM."
        raise ConfigError(
            "actor_rollout_ref.model.path",
            got,
            "a causal language model, which generates text",
            fix,
        )
    _check_vision(config, policy, has_critic=has_critic)
    positions = getattr(policy.get_text_config(), "max_position_embeddings", None)
    needed = config.data.max_prompt_length + config.data.max_response_length
    if positions is not None and needed > positions:
        expected = f"at most {positions}, the positions of {config.actor_rollout_ref.model.path}"
        fix = "Lower one of them, or give the model more with actor_rollout_ref.model.override_config."
        raise ConfigError(
            "data.max_prompt_length + data.max_response_length", f"{needed} tokens", expected, fix
        )
    _check_ways(config, policy, has_critic=has_critic)
    _check_routers(config, policy)
    text, size = policy.get_text_config(), rollout_group_size(config) * rollout_devices(config)
    heads = getattr(text, "num_attention_heads", 1)
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (keys % size and size % keys):
        where, got = f"{ROLLOUT}.tensor_model_parallel_size", f"{size}, for {heads} heads"
        expected = (
            f"a number that divides them, and that {keys} key-value heads divide or are divided by"
        )
        raise ConfigError(
            where,
            got=f"{got} and {keys} key-value heads",
            expected=expected,
            fix="Choose another one.",
        )
    for where, layout, model in _arranged_models(config, has_critic=has_critic):
        if layout.has_own_modules:
            require_known(model, layout, config.actor_rollout_ref.actor.megatron, where)
        if (layout.sp, layout.tp, layout.pp, layout.ep) != (1, 1, 1, 1):
            text = model.get_text_config()
            shape = ModelShape(
                name=(model.architectures or [type(model).__name__])[0],
                num_layers=text.num_hidden_layers,
                num_heads=(heads := getattr(text, "num_attention_heads", 1)),
                num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
                tensor_plan={} if layout.has_own_modules else tensor_plan(text),
                num_experts=_num_experts(text),
            )
            check_model(layout, shape, where)


def _check_ways(config: Config, policy: Any, *, has_critic: bool) -> None:
    rollout = ENGINES[config.actor_rollout_ref.rollout.name]
    code = config.actor_rollout_ref.model.trust_remote_code
    for where, layout, model in _arranged_models(config, has_critic=has_critic):
        way = PACKED if where == "reward_model" else way_of(model, trust_remote_code=code)
        if not way.reason:
            continue
        alone = f"for an architecture whose rows are computed one at a time ({way.reason})"
        if (layout.sp, layout.tp, layout.pp) != (1, 1, 1):
            fix = "Shard the weights with fsdp_config.fsdp_size."
            raise ConfigError(
                where, f"{layout.describe()}, {alone}", "no other sizes than fsdp_size", fix
            )
        if where == ACTOR and rollout.needs_packed_rows:
            expected, fix = (
                "an engine that knows its layers",
                "Set it to hf, or to vllm where it loads the model.",
            )
            raise ConfigError(
                f"{ROLLOUT}.name", got=f"{rollout.name}, {alone}", expected=expected, fix=fix
            )
    limit, needed = (
        length_limit(policy),
        config.data.max_prompt_length + config.data.max_response_length,
    )
    if limit is not None and needed > limit and rollout.needs_packed_rows:
        got = f"{rollout.name}, for sequences of up to {needed} tokens of a model with rope_type=longrope"
        expected = (
            f"at most {limit} tokens: beyond, its positions depend on the length of a sequence"
        )
        raise ConfigError(
            f"{ROLLOUT}.name", got=got, expected=expected, fix="Set it to hf, or lower the lengths."
        )


def sizes_of_models(config: Config, *, has_critic: bool) -> Iterator[str]:
    """Of the models that learn, as their config.json describes them: their parameters, what a token costs, and what a
    process keeps of them; for people to read. Raises ConfigError: as `check_models`."""
    check_models(config, has_critic=has_critic)
    model, device = config.actor_rollout_ref.model, "cuda" if torch.cuda.is_available() else "cpu"
    arranged = {
        where: layout for where, layout, _ in _arranged_models(config, has_critic=has_critic)
    }
    for where, section in ((ACTOR, config.actor_rollout_ref.actor), (CRITIC, config.critic)):
        if (layout := arranged.get(where)) is None:
            continue
        path, options = _path_and_options(config, where)
        skeleton = skeleton_causal_lm(path, trust_remote_code=model.trust_remote_code, **options)
        is_adapted = model.has_adapter and where == ACTOR
        cost = model_cost(skeleton.requires_grad_(not is_adapted))
        total = sum(one.numel() for one in skeleton.parameters())
        layers = list(mixtures(skeleton))
        of_experts = sum(one.numel() for layer in layers for one in layer.experts.parameters())
        told = f"{where}: {total / 1e6:.1f} M parameters"
        if layers:
            counts = f"{router_of(layers[0]).top_k} of {layers[0].experts.num_experts} in each of {len(layers)} layers"
            told += f", {of_experts / 1e6:.1f} M of them experts, {counts} for a token"
        told += (
            f"; {(cost.num_block_parameters + cost.num_head_parameters) / 1e6:.1f} M multiply it"
        )
        forward, update = (
            f"{one(1, 1, 0) / 1e9:.3g}" for one in (cost.forward_flops, cost.update_flops)
        )
        yield f"{told}: {forward} GFLOP forward, {update} learned from, attention aside"
        dtype = choose_dtype(section.fsdp_config.model_dtype, device).value
        kept = layout.state_bytes(
            of_experts, total - of_experts, dtype.itemsize, is_trained=not is_adapted
        )
        what = "frozen weights" if is_adapted else "weights, AdamW's moments and sums of gradients"
        yield f"{where}: a process keeps about {kept / 1e9:.3g} GB of {what} ({layout.describe()}, {str(dtype)[6:]})"


def check_checkpoint(config: Config, checkpoint: Path | None) -> None:
    """Refuse to go on from a policy with another number of experts, as its config.json says; what else differs is found
    when it is read, and damage too. Raises CheckpointError: says both numbers."""
    if checkpoint is None:
        return
    try:
        known = json.loads((checkpoint / "actor" / "config.json").read_text(encoding="utf-8"))
        theirs = _num_experts(SimpleNamespace(**known.get("text_config", known)))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return
    if theirs != (ours := _num_experts(_model_config(config, ACTOR).get_text_config())):
        got, fix = (
            f"a model of {theirs} experts in a layer",
            "Resume with the model that the checkpoint was made of.",
        )
        raise CheckpointError(
            f"{checkpoint / 'actor'}", got, f"{ours}, as actor_rollout_ref.model.path has", fix
        )


def _num_experts(text: Any) -> int:
    """Of a layer; 0: it has none."""
    return next((count for name in EXPERT_COUNTS if (count := getattr(text, name, None))), 0)


def _check_routers(config: Config, policy: Any) -> None:
    actor, fix = config.actor_rollout_ref.actor, "Leave the key out."
    losses = {
        f"{ACTOR}.{one}": getattr(actor, one)
        for one in ("router_aux_loss_coef", "router_z_loss_coef")
    }
    experts = config.actor_rollout_ref.rollout.expert_parallel_size
    asked = losses | {
        f"{ACTOR}.router_replay": actor.router_replay,
        f"{ROLLOUT}.expert_parallel_size": experts - 1 and experts,
    }
    for key, value in asked.items():
        if value in (0.0, "off"):
            continue
        if not _num_experts(policy.get_text_config()):
            got = f"{value}, with a model without experts ({policy.model_type})"
            raise ConfigError(key, got=got, expected="a mixture of experts", fix=fix)
        way = way_of(policy, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
        if way.attention != PACKED.attention:
            got = f"{value}, with {policy.model_type}, whose rows are computed one at a time"
            raise ConfigError(key, got=got, expected="a model whose rows are packed", fix=fix)


def _check_vision(config: Config, policy: Any, *, has_critic: bool) -> None:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if not is_vision(policy):
        if actor.freeze_vision_tower:
            got, expected = (
                f"True, with a model without a vision encoder ({policy.model_type})",
                "one that has it",
            )
            raise ConfigError(
                f"{ACTOR}.freeze_vision_tower", got=got, expected=expected, fix="Leave the key out."
            )
        return
    if model.has_adapter and actor.freeze_vision_tower:
        got = "True, with an adapter, which learns in the vision encoder, too"
        fix = "Leave the key out; actor_rollout_ref.model.exclude_modules='.*visual.*' keeps the adapter out of it."
        raise ConfigError(
            f"{ACTOR}.freeze_vision_tower",
            got=got,
            expected="False: all weights are frozen",
            fix=fix,
        )
    if model.has_adapter and adapter_route(config).is_alone:
        got = f"{model.lora_merge}, with vllm and a vision-language model ({policy.model_type})"
        expected = "true: vLLM is not asked to apply an adapter in a vision encoder"
        raise ConfigError(
            "actor_rollout_ref.model.lora_merge", got=got, expected=expected, fix="Set it to true."
        )
    sizes = config.data.mm_processor_kwargs.model_dump(
        include={"min_pixels", "max_pixels"}, exclude_none=True
    )
    is_glm = (
        policy.model_type in ONE_TOKEN
        and ENGINES[config.actor_rollout_ref.rollout.name].cuts_images
    )
    if is_glm and (sizes or not policy.text_config.attention_bias):
        where = "data.mm_processor_kwargs" if sizes else "actor_rollout_ref.model.path"
        got, fix = (
            f"{sizes or 'attention_bias=false'}, with vllm and glm4v",
            "Set them in the model's own files.",
        )
        raise ConfigError(
            where, got=got, expected="the model's sizes, and attention_bias=true", fix=fix
        )
    if any(map(is_served, config.distillation.all_teachers)):
        got, fix = "a server, with a vision-language policy", "Let the run load the teacher."
        raise ConfigError(
            "distillation", got=got, expected="a model's folder: servers get no images", fix=fix
        )
    for where, layout, model in _arranged_models(config, has_critic=has_critic):
        if where == CRITIC and not is_vision(model):
            expected = f"a vision-language model too: {', '.join(VISION_TYPES)}"
            fix = "Leave the key out: the critic then starts from the policy's model."
            raise ConfigError(
                "critic.model.path", "a text model, with a vision-language policy", expected, fix
            )
        if where == "reward_model" and _shown(model) != _shown(policy):
            got = f"a model of type {model.model_type}, with a vision-language policy of type {policy.model_type}"
            fix = "Train one with `quadriga sft objective=reward_model`, or grade with custom_reward_function.path."
            raise ConfigError(
                f"{where}.model.path",
                got=got,
                expected="one with its image tokens and patches",
                fix=fix,
            )
        added = len(getattr(getattr(model, "vision_config", None), "deepstack_visual_indexes", ()))
        held = layers_of_stage(model.get_text_config().num_hidden_layers, 0, layout.pp)
        if layout.pp != 1 and added > len(held):
            got = f"{layout.describe()}, with {len(held)} layers in the first stage ({model.model_type})"
            raise ConfigError(
                where,
                got,
                f"at least {added} there, which images are added to",
                "Take fewer stages.",
            )


def _shown(model: Any) -> tuple[Any, ...]:
    """How images come to a model: its type, their tokens, and their patches; () of a text model."""
    if not is_vision(model):
        return ()
    sizes = (
        getattr(model.vision_config, f"{one}_size")
        for one in ("patch", "spatial_merge", "temporal_patch")
    )
    return (model.model_type, model.image_token_id, model.video_token_id, *sizes)


def layout_tables(config: Config, *, has_critic: bool) -> Iterator[str]:
    """For each role with several ranks, which rank has which rows."""
    warned = set()
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        if size > 1 and where not in warned:
            warned.add(where)
            layout = section.layout(size, where, config.actor_rollout_ref.actor.megatron_if_chosen)
            table = layout.table().replace("\n", "\n    ")
            yield f"  {where}: {layout.describe()}\n    {table}"


def _arranged_models(config: Config, *, has_critic: bool) -> Iterator[tuple[str, Layout, Any]]:
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        layout = section.layout(size, where, config.actor_rollout_ref.actor.megatron_if_chosen)
        if where != DISTILLATION:
            yield where, layout, _model_config(config, where)
            continue
        trusts = config.actor_rollout_ref.model.trust_remote_code
        for path in dict.fromkeys(config.distillation.loaded.values()):
            yield where, layout, load_config(path, trust_remote_code=trusts)


def _model_config(config: Config, where: str) -> Any:
    path, options = _path_and_options(config, where)
    return load_config(
        path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code, **options
    )


def _path_and_options(config: Config, where: str) -> tuple[str, dict[str, Any]]:
    model = config.actor_rollout_ref.model
    paths = {ACTOR: model.path, CRITIC: config.critic.model.path or model.path}
    path = paths.get(where, config.reward_model.model.path or "")
    return path, {"override_config": model.override_config} if path == model.path else {}
