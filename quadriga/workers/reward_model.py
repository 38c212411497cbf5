# SPDX-License-Identifier: Apache-2.0
"""The reward model: one score for each response, by a classifier that was trained to score responses.

It reads the policy's own tokens, or the chat rendered by its own template and tokenizer:

    rows of the policy ─ PolicyTokens ──────────────────────────────────────> SequenceTokens ─ sequences_batch ─> engine
                       └ RenderedChats: text, its own template, its tokens ─┘

Legend: B rows, P prompt positions, T response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.data.tokenizing import read_tokenizer
from quadriga.engines.batches import MicroBatching
from quadriga.engines.step import infer
from quadriga.errors import ConfigError, DataError, EngineError, RewardError
from quadriga.models.reward_model import load_reward_model
from quadriga.models.scorers import RewardScorer
from quadriga.observe.machine import release_free_memory
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Execute, register
from quadriga.workers.base import BY_REPLICA, CHAT_OBJECTS, EngineWorker, build_engine
from quadriga.workers.models import LoadedModel

_KEY = "reward_model.model.input_tokenizer"


class RewardModelWorker(EngineWorker):
    """A frozen reward model.

    Args:
        config: of which `reward_model` and `trainer` are read.
        tokenizer: of the policy, whose responses are scored.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and its tokenizer. Returns what was chosen, with reasons, for people to read."""
        section, model_section = self.config.reward_model, self.config.reward_model.model
        self.join(section, model_section.fsdp_config, "reward_model.model")
        # Every rank loads the full model, and keeps its shard.
        model = load_reward_model(
            str(model_section.path),
            dtype=self.dtype.value,
            device=self.device,
            trust_remote_code=model_section.trust_remote_code,
        )
        vocabulary_size = model.get_input_embeddings().num_embeddings
        loaded = LoadedModel(RewardScorer(model), None)
        self.engine = build_engine(
            loaded, model_section.fsdp_config, self.dtype.value, self.processes, name="reward model"
        )
        self.inputs, tokenizer_limit, reason = choose_inputs(self.config, self.tokenizer, vocabulary_size)
        self.limit = self._choose_limit(model.config.get_text_config(), tokenizer_limit)
        about = self.engine.describe()
        longest = "" if self.limit is None else f", up to {self.limit} tokens"
        return {
            "reward model": f"{about['parameters'] / 1e6:.1f} M parameters, {about['weights']} ({self.dtype.reason})",
            "reward inputs": f"{reason}{longest}",
        }

    def _choose_limit(self, model_config: Any, tokenizer_limit: int | None) -> int | None:
        """The longest input in tokens; None: nothing bounds it."""
        positions = getattr(model_config, "max_position_embeddings", None)
        given = self.config.reward_model.max_length
        if given is not None and positions is not None and given > positions:
            raise ConfigError(
                "reward_model.max_length",
                got=str(given),
                expected=f"at most {positions}, the positions of the reward model",
                fix="Lower it, or leave it out.",
            )
        return given or min((limit for limit in (positions, tokenizer_limit) if limit), default=None)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def reads_chats(self) -> bool:
        """Whether `compute_rm_score` reads `raw_prompt` and `uid` beside the tokens."""
        return self.inputs.reads_chats

    @register(dispatch_mode=BY_REPLICA)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the score at the last valid token of each response, zero elsewhere.

        Metrics: `reward/rm_cut`, the sequences whose beginning was cut off because they were too long.

        Raises:
            EngineError: a row without a prompt or without a response.
            RewardError: a score that is not finite.
        """
        rows = self.inputs.sequences(data)
        num_cut = 0
        if self.limit is not None:
            num_cut = sum(row.length > self.limit for row in rows)
            rows = [row.cut(self.limit) if row.length > self.limit else row for row in rows]
        section = self.config.reward_model
        num_sequences = None if section.use_dynamic_bsz else section.micro_batch_size_per_gpu
        micro = MicroBatching(num_sequences, section.forward_max_token_len_per_gpu, self.share_prompts)
        scores = infer(self.engine, sequences_batch(rows), micro)["scores"].sum(-1)
        release_free_memory()
        broken = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
        if broken:
            raise RewardError(
                "reward model",
                got=f"{len(broken)} of {len(scores)} scores that are not finite, first {scores[broken[0]]:g} for row "
                f"{broken[0]}",
                expected="finite scores",
                fix="Set reward_model.model.fsdp_config.model_dtype=float32, or check the model's weights.",
            )
        num_columns = data.batch["response_mask"].shape[1]
        lengths = data.batch["attention_mask"][:, -num_columns:].sum(-1)
        rm_scores = torch.zeros(len(data), num_columns, dtype=torch.float32)
        rm_scores[torch.arange(len(data)), lengths - 1] = scores
        metrics = {"reward/rm_cut": Metric(num_cut, "sum")}
        return DataProto.from_dict(tensors={"rm_scores": rm_scores}, meta_info={"metrics": metrics})


@dataclass(frozen=True)
class SequenceTokens:
    """The tokens of one row for the reward model: the beginning that it may share with others, and the rest."""

    prompt: list[int]
    response: list[int]

    def cut(self, limit: int) -> "SequenceTokens":
        """The last `limit` tokens; of them the first counts as prompt if no other is left of it."""
        tokens = [*self.prompt, *self.response][-limit:]
        kept = max(1, len(tokens) - len(self.response))
        return SequenceTokens(tokens[:kept], tokens[kept:])

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.response)


class PolicyTokens:
    """The tokens as they are.

    Args:
        vocabulary_size: of the reward model.
    """

    reads_chats = False

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def sequences(self, data: DataProto) -> list[SequenceTokens]:
        """The rows as sequences of the reward model.

        Raises:
            EngineError: a row lacks prompt or response, or has a token that the reward model does not know.
        """
        rows = [SequenceTokens(prompt.tolist(), response.tolist()) for prompt, response in _valid_tokens(data)]
        highest = max((max(*row.prompt, *row.response) for row in rows), default=0)
        if highest >= self.vocabulary_size:
            raise EngineError(
                "reward model",
                got=f"token id {highest} of the policy",
                expected=f"ids below {self.vocabulary_size}, the size of its vocabulary",
                fix=f"Set {_KEY} to the policy's tokenizer: responses are then rendered for the reward model.",
            )
        return rows


class RenderedChats:
    """Decoded responses as the assistant's turn of their chats, by the reward model's template and tokenizer.

    Args:
        policy: decodes.
        judge: renders and encodes; it has a chat template.
    """

    reads_chats = True

    def __init__(self, policy: PreTrainedTokenizerBase, judge: PreTrainedTokenizerBase) -> None:
        self.policy, self.judge = policy, judge

    def sequences(self, data: DataProto) -> list[SequenceTokens]:
        """The rows as sequences of the reward model. The common prefix of the responses to a prompt counts as prompt.

        Raises:
            EngineError: a row lacks prompt or response.
            DataError: there are no chats, or the template refuses one.
        """
        responses = [response for _, response in _valid_tokens(data)]
        texts = self.policy.batch_decode(responses, skip_special_tokens=True) if responses else []
        for key in CHAT_OBJECTS:
            if key not in data.non_tensor_batch:
                raise DataError(
                    f"column {key}",
                    got="nothing",
                    expected="the chat messages of each prompt, for the reward model's own template",
                    fix="A data set of your own must put them into each row where data.return_raw_chat is true.",
                )
        chats, uids = (data.non_tensor_batch[key] for key in CHAT_OBJECTS)
        rendered = [self._render(chat, text, uid) for chat, text, uid in zip(chats, texts, uids, strict=True)]
        # The template has written the special tokens.
        encoded = self.judge(rendered, add_special_tokens=False)["input_ids"] if rendered else []
        groups: dict[Any, list[list[int]]] = {}
        for uid, tokens in zip(uids, encoded, strict=True):
            groups.setdefault(uid, []).append(tokens)
        shared: dict[Any, int] = {}
        for uid, members in groups.items():
            first, last = min(members), max(members)  # in lexicographic order: what these two share, all share
            differing = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
            shared[uid] = max(1, next(differing, len(first)))
        return [
            SequenceTokens(tokens[: shared[uid]], tokens[shared[uid] :])
            for uid, tokens in zip(uids, encoded, strict=True)
        ]

    def _render(self, chat: Sequence[dict[str, Any]], response: str, uid: Any) -> str:
        messages = [*chat, {"role": "assistant", "content": response}]
        try:
            return str(self.judge.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
        except Exception as error:
            # A template is a program of the model's author: it may raise what it likes about messages that it dislikes.
            raise DataError(
                f"prompt {uid}",
                got=f"a chat that the reward model's template refuses ({type(error).__name__}: {error})",
                expected="messages in the form that the reward model was trained on",
                fix="Correct the row's chat, or use another reward model.",
            ) from error


def choose_inputs(
    config: Config, policy: PreTrainedTokenizerBase, vocabulary_size: int
) -> tuple[PolicyTokens | RenderedChats, int | None, str]:
    """How the reward model of a run reads, how many tokens its tokenizer allows, and why, for people to read.

    Args:
        config: names the reward model and its tokenizer.
        policy: the policy's tokenizer.
        vocabulary_size: of the reward model.

    Raises:
        ConfigError: the tokens must be rendered again and cannot be.
    """
    model = config.reward_model.model
    if model.input_tokenizer is None:
        return PolicyTokens(vocabulary_size), None, f"the policy's tokens as they are ({_KEY} is null)"
    judge = _load(str(model.path), "reward_model.model.path", model.trust_remote_code)
    # The longest input in tokens; where none is known, transformers says a number beyond all models.
    limit = int(judge.model_max_length) if judge.model_max_length < 2**31 else None
    template = config.data.apply_chat_template_kwargs.get("chat_template", policy.chat_template)
    difference = _difference(policy, judge, template)
    if model.input_tokenizer != "auto":
        source = _load(model.input_tokenizer, _KEY, model.trust_remote_code)
        if source.get_vocab() != policy.get_vocab():
            raise ConfigError(
                _KEY,
                got=f"'{model.input_tokenizer}', whose vocabulary is not that of the run's tokenizer",
                expected="the policy's tokenizer: it decodes the responses",
                fix=f"Set {_KEY}=auto, or leave it out.",
            )
        difference = f"{_KEY} is set"
    elif difference is None:
        return PolicyTokens(vocabulary_size), limit, "the policy's tokens as they are: one tokenizer for both"
    if not judge.chat_template:
        raise ConfigError(
            "reward_model.model.path",
            got=f"a tokenizer without a chat template, where {difference}",
            expected="a template to render chats with for the reward model",
            fix='Set "chat_template" in its tokenizer_config.json, or, if the policy\'s tokens mean the same to it, '
            f"{_KEY}=null.",
        )
    return RenderedChats(policy, judge), limit, f"chats rendered by its own template: {difference}"


def _difference(policy: PreTrainedTokenizerBase, judge: PreTrainedTokenizerBase, template: Any) -> str | None:
    """Why tokens of the policy would not be what the reward model was trained on; None: they are."""
    if policy.get_vocab() != judge.get_vocab():
        return "its vocabulary is not the policy's"
    if template != judge.chat_template:
        return "its chat template is not the policy's"
    return None


def _load(path: str, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return read_tokenizer(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            key,
            got=f"'{path}' ({str(error).strip().partition(chr(10))[0]})",
            expected="a folder or hub name with a tokenizer that transformers can load",
            fix=f"Put the tokenizer beside the model, or set {_KEY}=null if it is the policy's own.",
        ) from error


def _valid_tokens(data: DataProto) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompt and response of each row without padding."""
    input_ids, attention = (data.batch[key].cpu().numpy() for key in ("input_ids", "attention_mask"))
    width = input_ids.shape[1] - data.batch["response_mask"].shape[1]
    rows = []
    for number, (tokens, valid) in enumerate(zip(input_ids, attention != 0, strict=True)):
        prompt, response = tokens[:width][valid[:width]], tokens[width:][valid[width:]]
        for name, part in (("prompt", prompt), ("response", response)):
            if not len(part):
                raise EngineError(
                    f"row {number} of a batch for the reward model",
                    got=f"an empty {name}",
                    expected="at least one token",
                )
        rows.append((prompt, response))
    return rows


def sequences_batch(rows: Sequence[SequenceTokens]) -> DataProto:
    """Sequences as a batch whose one predicted token stands behind each sequence: what predicts it is its last token.

    Returns:
        input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T], with the token behind counted in T.
    """
    before = max((len(row.prompt) for row in rows), default=1)
    after = max((len(row.response) for row in rows), default=0) + 1
    input_ids = torch.zeros(len(rows), before + after, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for number, row in enumerate(rows):
        start, stop = before - len(row.prompt), before + len(row.response)
        input_ids[number, start:stop] = torch.tensor([*row.prompt, *row.response])
        attention_mask[number, start : stop + 1] = 1
    last = torch.tensor([len(row.response) for row in rows], dtype=torch.int64)
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": (torch.arange(after) == last[:, None]).long(),
        }
    )
