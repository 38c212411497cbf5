# SPDX-License-Identifier: Apache-2.0
"""Teachers of on-policy distillation: frozen models that say how likely the student's responses are, and other tokens.

    rows, by data source ─┬─ a model in an engine, which may rest between steps ──┬─> teacher_log_prob [B, T]
                          └─ servers, asked for the log-probs of a prompt ────────┘   teacher_top_* [B, T, k]

Legend: B rows, P prompt positions, T response positions, k likeliest tokens.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.config.distillation import is_served
from quadriga.config.placement import DISTILLATION
from quadriga.data.tokenizing import read_tokenizer
from quadriga.engines.batches import MicroBatching
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.objectives import TEACHER_LOG_PROB, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from quadriga.engines.step import infer
from quadriga.errors import ConfigError, EngineError
from quadriga.models.load import load_config
from quadriga.models.scorers import PolicyScorer
from quadriga.observe.machine import release_free_memory
from quadriga.protocol import DataProto
from quadriga.rollout.http import ServedScorer
from quadriga.single_controller import Dispatch, register
from quadriga.workers.base import BY_REPLICA, EngineWorker, timed
from quadriga.workers.models import load_model

_OUTPUTS = {
    "log_probs": TEACHER_LOG_PROB,
    "top_log_probs": TEACHER_TOP_LOG_PROBS,
    "top_ids": TEACHER_TOP_IDS,
}


class TeacherWorker(EngineWorker):
    """The teachers of all data sources, and the tokenizer of the student."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the teachers. Returns what was chosen, with reasons, for people to read."""
        self.section = section = self.config.distillation
        self.join(section, section.fsdp_config, DISTILLATION)
        self.teachers: dict[str, FSDPEngine | ServedScorer] = {}
        about = []
        for path in section.all_teachers:
            if is_served(path):
                self.teachers[path] = served = _served(self.config, path)
                about.append(f"{served.model} at {path}")
                continue
            loaded = load_model(
                self.config, path, PolicyScorer, self.dtype.value, self.processes, is_teacher=True
            )
            self.teachers[path], size = self.build_frozen(
                loaded, section.fsdp_config, f"teacher {path}"
            )
            about.append(f"{path}, {size}")
        return {"teacher": "; ".join(about)}

    @register(dispatch_mode=BY_REPLICA, blocking=False)
    @timed("teacher")
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """`teacher_log_prob` [B, T] of each row by its teacher, and with `forward_kl_topk` `teacher_top_log_probs` and
        `teacher_top_ids` [B, T, k].
        Raises ConfigError: a data source has no teacher. EngineError: a teacher's likeliest tokens are none of the
        student's. RolloutError: a server cannot be asked, or replies with something else."""
        section, num_top = self.section, self.section.num_top_tokens
        owners, shape = self._owners(data), data.batch["response_mask"].shape
        columns = {TEACHER_LOG_PROB: torch.zeros(shape)}
        if num_top is not None:
            columns[TEACHER_TOP_LOG_PROBS] = torch.zeros(*shape, num_top)
            columns[TEACHER_TOP_IDS] = torch.zeros(*shape, num_top, dtype=torch.int32)
        for path, teacher in self.teachers.items():
            # All ranks ask each teacher in turn: they may share its weights.
            rows = [number for number, owner in enumerate(owners) if owner == path]
            part = data if len(rows) == len(data) else data.select_idxs(rows)
            if isinstance(teacher, FSDPEngine):
                if part.batch["position_ids"].dim() == 3 and teacher.image_tokens is None:
                    # A text model, for rows without images of a vision-language student.
                    part = part.select(deepcopy=True)
                    part.batch["position_ids"] = (
                        part.batch["attention_mask"].cumsum(-1) - 1
                    ).clamp(min=0)
                micro = MicroBatching(
                    None, section.log_prob_max_token_len_per_gpu, self.share_prompts
                )
                temperature = self.config.actor_rollout_ref.rollout.temperature
                scores = infer(teacher, part, micro, temperature=temperature, top_k=num_top)
            else:
                # The other ranks with the same rows return none.
                scores = teacher.scores(part) if self.processes.place.is_collected else {}
            for name, values in scores.items():
                columns[_OUTPUTS[name]][rows] = values
        release_free_memory()
        highest = int(columns[TEACHER_TOP_IDS].max()) if num_top is not None and len(data) else 0
        if highest >= len(self.tokenizer):
            got = f"token {highest} among the {num_top} likeliest ones"
            expected = f"ids below {len(self.tokenizer)}, the tokens of the student"
            raise EngineError(
                "teacher", got=got, expected=expected, fix=f"Lower {DISTILLATION}.topk."
            )
        return DataProto.from_dict(tensors=columns)

    def _owners(self, data: DataProto) -> list[str]:
        if not self.section.teachers:
            return self.section.all_teachers * len(data)
        sources = data.non_tensor_batch[self.config.data.reward_fn_key]
        require_teachers(
            self.config, ((f"row {number} of a batch", one) for number, one in enumerate(sources))
        )
        return [str(self.section.teacher_of(one)) for one in sources]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """End requests, and leave the process group of the role."""
        for teacher in self.teachers.values():
            if isinstance(teacher, ServedScorer):
                teacher.close()
        super().close()


def _served(config: Config, addresses: str) -> ServedScorer:
    section = config.distillation
    return ServedScorer(addresses, DISTILLATION, section.engine_kwargs, section.num_top_tokens)


def check_teachers(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """ConfigError, before a process starts: teachers that know other tokens than the student, or too few positions."""
    section, longest = (
        config.distillation,
        config.data.max_prompt_length + config.data.max_response_length,
    )
    own = tokenizer.get_vocab()
    for key, path in section.named.items():
        if is_served(path):
            server = _served(config, path)
            try:
                server.require_tokens_of(tokenizer, longest)
            finally:
                server.close()
            continue
        trusts = config.actor_rollout_ref.model.trust_remote_code
        try:
            others = read_tokenizer(path, trust_remote_code=trusts).get_vocab()
        except (OSError, ValueError, KeyError) as error:
            got = f"'{path}' ({str(error).strip().partition(chr(10))[0]})"
            fix = "Put the tokenizer beside the model: it shows that both know the same tokens."
            raise ConfigError(
                key, got=got, expected="a model with its tokenizer", fix=fix
            ) from error
        differing = [token for token, number in own.items() if others.get(token) != number]
        if section.num_top_tokens:
            # What it tells besides the tokens of the response must be tokens of the student.
            differing += [token for token in others if token not in own]
        if differing:
            token = differing[0]
            got = f"'{path}', whose tokenizer has other ids for {len(differing)} tokens, first {token!r}"
            got += f" ({others.get(token, 'none')}; the student's {own.get(token, 'none')})"
            fix = "Choose a teacher with the student's vocabulary."
            raise ConfigError(
                key, got=got, expected="the student's tokens under the same ids", fix=fix
            )
        text = load_config(path, trust_remote_code=trusts).get_text_config()
        if (
            limit := getattr(text, "max_position_embeddings", None)
        ) is not None and limit < longest:
            got = f"'{path}' with {limit} positions, for sequences of up to {longest} tokens"
            raise ConfigError(
                key, got=got, expected=f"at least {longest}", fix="Lower the lengths under data."
            )
        if (size := section.num_top_tokens) and size > text.vocab_size:
            got, fix = f"{size}, with a vocabulary of {text.vocab_size}", "Lower it."
            raise ConfigError(
                f"{DISTILLATION}.topk", got=got, expected=f"at most {text.vocab_size}", fix=fix
            )


def require_teachers(config: Config, sources: Iterable[tuple[str, Any]]) -> None:
    """Refuse rows, each a place and its data source, that no teacher is named for. Raises ConfigError: says which."""
    section = config.distillation
    for place, source in sources:
        if section.enable and section.teacher_of(source) is None:
            got, expected = (
                f"no teacher for the data source {source!r} ({place})",
                "one for each data source",
            )
            fix = f"Add it, or set {DISTILLATION}.path for all that are not named."
            raise ConfigError(f"{DISTILLATION}.teachers", got=got, expected=expected, fix=fix)
