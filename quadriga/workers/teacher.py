# SPDX-License-Identifier: Apache-2.0
"""Teachers of on-policy distillation: frozen models that score the student's responses.

    rows, by data source ─┬─ a model in an engine ──────────────────┬─> teacher_log_prob [B, T]
                          └─ servers that return prompt log-probs ──┘   teacher_top_* [B, T, k]

Legend: B rows, P prompt positions, T response positions, k likeliest tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.config.distillation import is_served
from quadriga.config.length_checks import too_short_teacher
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
    """The teachers of all data sources."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the teachers. Returns the choices, with reasons, to be printed."""
        self.section = self.config.distillation
        fsdp = self.section.fsdp_config
        self.join(self.section, fsdp, DISTILLATION)
        # Each teacher is in one of these, under its path in the configuration.
        self.engines: dict[str, FSDPEngine] = {}  # by folder
        self.servers: dict[str, ServedScorer] = {}  # by address
        descriptions = []
        for path in self.section.all_teachers:
            if is_served(path):
                self.servers[path] = _make_client(self.config, path)
                descriptions.append(f"{self.servers[path].model} at {path}")
                continue
            loaded = load_model(
                self.config, path, PolicyScorer, self.dtype.value, self.processes, is_teacher=True
            )
            self.engines[path], about = self.build_frozen(loaded, fsdp, f"teacher {path}")
            descriptions.append(f"{path}, {about}")
        return {"teacher": "; ".join(descriptions)}

    @register(BY_REPLICA, blocking=False)
    @timed("teacher")
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Score each row by the teacher of its data source.

        Args:
            data: rows with `MODEL_INPUTS`, and the data source if there are several teachers.

        Returns:
            `teacher_log_prob` [B, T], and with `forward_kl_topk` also `teacher_top_log_probs` and
            `teacher_top_ids` [B, T, k].

        Raises:
            ConfigError: a data source has no teacher.
            EngineError: the student lacks one of a teacher's likeliest tokens.
            RolloutError: a server does not reply as expected.
        """
        num_top = self.section.num_top_tokens
        teacher_of_row = self._teachers_of_rows(data)
        shape = data.batch["response_mask"].shape
        columns = {TEACHER_LOG_PROB: torch.zeros(shape)}
        if num_top is not None:
            columns[TEACHER_TOP_LOG_PROBS] = torch.zeros(*shape, num_top)
            columns[TEACHER_TOP_IDS] = torch.zeros(*shape, num_top, dtype=torch.int32)
        for path in self.section.all_teachers:
            # A teacher without rows on this rank computes, too: if ranks share its weights, all
            # must take part.
            rows = [row for row, teacher in enumerate(teacher_of_row) if teacher == path]
            part = data if len(rows) == len(data) else data.select_idxs(rows)
            scores = {}
            if path in self.engines:
                scores = self._infer(self.engines[path], part)
            elif self.processes.place.is_collected:
                # Of the ranks with the same rows, only the one whose result is returned asks the
                # server. The columns of the others stay zero.
                scores = self.servers[path].scores(part)
            for name, values in scores.items():
                columns[_OUTPUTS[name]][rows] = values
        release_free_memory()
        # A teacher's output layer may have more tokens than its tokenizer, with ids that the
        # student lacks.
        highest = int(columns[TEACHER_TOP_IDS].max()) if num_top is not None and len(data) else 0
        if highest >= len(self.tokenizer):
            raise EngineError(
                "teacher",
                got=f"token {highest} among the {num_top} likeliest ones",
                expected=f"ids below {len(self.tokenizer)}, the tokens of the student",
                fix=f"Lower {DISTILLATION}.topk.",
            )
        return DataProto.from_dict(tensors=columns)

    def _infer(self, teacher: FSDPEngine, rows: DataProto) -> dict[str, torch.Tensor]:
        """Score rows by a teacher in an engine. Returns the outputs of `infer`, by name."""
        section = self.section
        if rows.batch["position_ids"].dim() == 3 and teacher.packing.image_tokens is None:
            # The student is a vision-language model, the teacher a text model, which takes one
            # position per token.
            rows = rows.select(deepcopy=True)
            positions = rows.batch["attention_mask"].cumsum(-1) - 1
            rows.batch["position_ids"] = positions.clamp(min=0)
        micro = MicroBatching(None, section.log_prob_max_token_len_per_gpu, self.share_prompts)
        return infer(
            teacher,
            rows,
            micro,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            top_k=section.num_top_tokens,
        )

    def _teachers_of_rows(self, data: DataProto) -> list[str]:
        """Path of the teacher of each row [B], a key of `engines` or `servers`."""
        # A single teacher scores all rows.
        if not self.section.teachers:
            return self.section.all_teachers * len(data)
        sources = data.non_tensor_batch[self.config.data.reward_fn_key]
        places = (f"row {number} of a batch" for number in range(len(sources)))
        require_teachers(self.config, zip(places, sources, strict=True))
        return [str(self.section.teacher_of(source)) for source in sources]

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Close the connections to servers, and leave the process group of the role."""
        for server in self.servers.values():
            server.close()
        super().close()


def _make_client(config: Config, addresses: str) -> ServedScorer:
    """Create a client for the servers of a teacher."""
    section = config.distillation
    return ServedScorer(addresses, DISTILLATION, section.engine_kwargs, section.num_top_tokens)


def check_teachers(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the teachers before processes are started.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the student.

    Raises:
        ConfigError: a teacher has other tokens than the student, too few positions for the longest
            sequence, or fewer tokens than `topk`.
    """
    section = config.distillation
    longest = config.data.max_prompt_length + config.data.max_response_length
    num_top = section.num_top_tokens
    vocab = tokenizer.get_vocab()
    for key, path in section.named_teachers.items():
        if is_served(path):
            server = _make_client(config, path)
            try:
                server.require_same_tokenizer_and_room(tokenizer, longest)
            finally:
                server.close()
            continue
        trusts = config.actor_rollout_ref.model.trust_remote_code
        _check_vocabulary(config, key, path, vocab)

        text = load_config(path, trust_remote_code=trusts).get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None and positions < longest:
            raise too_short_teacher(key, longest, positions, path)
        if num_top and num_top > text.vocab_size:
            raise ConfigError(
                f"{DISTILLATION}.topk",
                got=f"{num_top}, with a vocabulary of {text.vocab_size}",
                expected=f"at most {text.vocab_size}",
                fix=f"Lower {DISTILLATION}.topk.",
            )


def _check_vocabulary(config: Config, key: str, path: str, vocab: Mapping[str, int]) -> None:
    """Check that a teacher in an engine has the student's tokens under the same ids.

    Args:
        config: the configuration.
        key: key that names the teacher, for errors.
        path: folder or hub name of the teacher.
        vocab: ids of the student's tokens.

    Raises:
        ConfigError: the teacher has other ids for some tokens, or its tokenizer cannot be loaded.
    """
    try:
        trusts = config.actor_rollout_ref.model.trust_remote_code
        teacher_vocab = read_tokenizer(path, trust_remote_code=trusts).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            key,
            got=f"'{path}' ({reason})",
            expected="a model with its tokenizer, to compare its tokens with the student's",
            fix="Put the tokenizer beside the model.",
        ) from error

    differing = [token for token, number in vocab.items() if teacher_vocab.get(token) != number]
    if config.distillation.num_top_tokens:
        # Any token of the teacher may be among the likeliest, so the student must have all tokens.
        differing += [token for token in teacher_vocab if token not in vocab]
    if not differing:
        return
    token = differing[0]
    raise ConfigError(
        key,
        got=f"'{path}', whose tokenizer has other ids for {len(differing)} tokens, "
        f"first {token!r} ({teacher_vocab.get(token, 'none')}; "
        f"the student's {vocab.get(token, 'none')})",
        expected="the student's tokens under the same ids",
        fix="Choose a teacher with the student's vocabulary.",
    )


def require_teachers(config: Config, sources: Iterable[tuple[str, Any]]) -> None:
    """Refuse rows without a teacher. Without distillation, all rows pass.

    Args:
        config: the configuration.
        sources: for each row, its place (such as "row 3 of a batch") for the message, and its data
            source.

    Raises:
        ConfigError: a data source has no teacher.
    """
    section = config.distillation
    for place, source in sources:
        if section.enable and section.teacher_of(source) is None:
            raise ConfigError(
                f"{DISTILLATION}.teachers",
                got=f"no teacher for the data source {source!r} ({place})",
                expected="a teacher for each data source",
                fix=f"Add it, or set {DISTILLATION}.path for all data sources that are not named.",
            )
