# SPDX-License-Identifier: Apache-2.0
"""What a reward model reads of a batch: the policy's own tokens, or the chat in the reward model's own words.

    rows of the policy ─ PolicyTokens ──────────────────────────────────────> SequenceTokens ─ sequences_batch ─> engine
                       └ RenderedChats: text, its own template, its tokens ─┘

Legend: B rows, P prompt positions, T response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.data.tokenizing import read_tokenizer
from quadriga.errors import ConfigError, DataError, EngineError
from quadriga.protocol import DataProto

_KEY = "reward_model.model.input_tokenizer"


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


class RewardInputs(Protocol):
    """How rows become sequences of the reward model; `reads_chats`: from `raw_prompt` and `uid` too."""

    reads_chats: bool

    def sequences(self, data: DataProto) -> list[SequenceTokens]:
        """One for each row."""
        ...


class PolicyTokens:
    """The tokens as they are.

    Args:
        vocabulary_size: of the reward model.
    """

    reads_chats = False

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def sequences(self, data: DataProto) -> list[SequenceTokens]:
        """See `RewardInputs`.

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
        """See `RewardInputs`. What the answers to one prompt have in common from the start counts as their prompt.

        Raises:
            EngineError: a row lacks prompt or response.
            DataError: there are no chats, or the template refuses one.
        """
        responses = [response for _, response in _valid_tokens(data)]
        texts = self.policy.batch_decode(responses, skip_special_tokens=True) if responses else []
        chats, uids = _column(data, "raw_prompt"), _column(data, "uid")
        rendered = [self._render(chat, text, uid) for chat, text, uid in zip(chats, texts, uids, strict=True)]
        # The template has written the special tokens.
        encoded = self.judge(rendered, add_special_tokens=False)["input_ids"] if rendered else []
        groups: dict[Any, list[list[int]]] = {}
        for uid, tokens in zip(uids, encoded, strict=True):
            groups.setdefault(uid, []).append(tokens)
        shared = {uid: max(1, _shared_length(members)) for uid, members in groups.items()}
        return [
            SequenceTokens(tokens[: shared[uid]], tokens[shared[uid] :])
            for uid, tokens in zip(uids, encoded, strict=True)
        ]

    def _render(self, chat: Sequence[dict[str, Any]], answer: str, uid: Any) -> str:
        messages = [*chat, {"role": "assistant", "content": answer}]
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
) -> tuple[RewardInputs, int | None, str]:
    """How the reward model of a run reads, how many tokens its tokenizer allows, and why, for people to read.

    Args:
        config: of the run.
        policy: the tokenizer of the run.
        vocabulary_size: of the reward model.

    Raises:
        ConfigError: the tokens must be rendered again and cannot be.
    """
    model = config.reward_model.model
    if model.input_tokenizer is None:
        return PolicyTokens(vocabulary_size), None, f"the policy's tokens as they are ({_KEY} is null)"
    judge = _load(str(model.path), "reward_model.model.path", model.trust_remote_code)
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
        return PolicyTokens(vocabulary_size), _limit(judge), "the policy's tokens as they are: one tokenizer for both"
    if not judge.chat_template:
        raise ConfigError(
            "reward_model.model.path",
            got=f"a tokenizer without a chat template, where {difference}",
            expected="a template to render chats with for the reward model",
            fix='Set "chat_template" in its tokenizer_config.json, or, if the policy\'s tokens mean the same to it, '
            f"{_KEY}=null.",
        )
    return RenderedChats(policy, judge), _limit(judge), f"chats rendered by its own template: {difference}"


def _shared_length(rows: Sequence[list[int]]) -> int:
    """How many tokens all rows begin with."""
    first, last = min(rows), max(rows)  # in the order of a dictionary: what these two share, all share
    pairs = zip(first, last, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(map(len, rows)))


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


def _limit(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens that its model takes, as it says; transformers' word for a number not known is one beyond all models."""
    limit = tokenizer.model_max_length
    return int(limit) if limit < 2**31 else None


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


def _column(data: DataProto, key: str) -> np.ndarray:
    if key not in data.non_tensor_batch:
        raise DataError(
            f"column {key}",
            got="nothing",
            expected="the chat messages of each prompt, for the reward model's own template",
            fix="A data set of your own must put them into each row where data.return_raw_chat is true.",
        )
    return data.non_tensor_batch[key]


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
