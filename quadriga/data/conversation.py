# SPDX-License-Identifier: Apache-2.0
"""A conversation as tokens, of which those that the assistant has to say are marked.

    messages   user          assistant      user          assistant
    tokens     prompt        answer         delta         answer
    marked     0 0 0 0       1 1 1 0        0 0 0 0       1 1 1

Each part is tokenized by itself, as in a rollout: there the prompt is tokenized, the model adds its own tokens, and of
a further turn only what is new is tokenized. An answer is marked up to and with its end-of-sequence token; what a
template writes behind that one (a line break, say) the model is never asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quadriga.data.tokenizing import ChatEncoder, Messages, as_messages
from quadriga.errors import DataError

ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """Tokens, int32 [L], and which of them are learned, bool [L]."""

    ids: np.ndarray
    is_learned: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextPart:
    """A piece of a rendered conversation, and whether the assistant has to say it."""

    text: str
    is_learned: bool


def text_parts(
    messages: Messages, encoder: ChatEncoder, *, where: str, tools: Sequence[Any] | None = None
) -> list[TextPart]:
    """A conversation as the chat template writes it, cut before and after each turn of the assistant.

    Args:
        messages: with a turn of the assistant among them; what follows the last one is left out.
        encoder: renders.
        where: the file and row that an error names.
        tools: told to the template, where the row has some.

    Raises:
        DataError: no turn of the assistant, an empty one, one at the very beginning, or a template that writes earlier
            turns in another way once later ones follow.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise DataError(
            where,
            got=f"a chat of {len(messages)} messages, none of them by the assistant",
            expected="at least one: its tokens are what is learned",
            fix="Leave the row out, or name the column of the whole chat with data.messages_key.",
        )
    if turns[0] == 0:
        raise DataError(where, got="a chat that begins with the assistant", expected="a question before the answer")
    parts: list[TextPart] = []
    written = ""
    for turn in turns:
        _require_words(messages[turn], f"{where}, message {turn}")
        before = _rendered(encoder, messages[:turn], where, tools, is_question=True)
        after = _rendered(encoder, messages[: turn + 1], where, tools, is_question=False)
        for shorter, longer in ((written, before), (before, after)):
            if not longer.startswith(shorter):
                raise _rewritten(where, turn, shorter, longer)
        parts += [TextPart(before[len(written) :], False), TextPart(after[len(before) :], True)]
        written = after
    return parts


def conversation(parts: Sequence[Sequence[int]], is_answer: Sequence[bool], eos_token_id: int | None) -> Conversation:
    """The parts of a conversation put together.

    Args:
        parts: token ids of each.
        is_answer: whether each is a turn of the assistant.
        eos_token_id: ends a turn; put behind the last one if the template does not write it there.
    """
    ids: list[int] = []
    learned: list[bool] = []
    for number, (tokens, is_learned) in enumerate(zip(parts, is_answer, strict=True)):
        tokens = list(tokens)
        if is_learned and number == len(parts) - 1:
            tokens = _closed(tokens, eos_token_id)
        ids += tokens
        end = _end_of_turn(tokens, eos_token_id) if is_learned else 0
        learned += [position < end for position in range(len(tokens))]
    return Conversation(np.array(ids, dtype=np.int32), np.array(learned, dtype=bool))


def chat_of_row(value: Any, *, where: str) -> Messages:
    """The messages of a row.

    Raises:
        DataError: there are none, or they are no chat.
    """
    if value is None or (isinstance(value, Sequence) and len(value) == 0):
        raise DataError(
            where,
            got="no messages",
            expected='a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
            fix="Correct the row, or name the column that holds the chats with data.messages_key.",
        )
    return as_messages(value, where=where)


def _closed(tokens: list[int], eos_token_id: int | None) -> list[int]:
    """The last answer: it ends with the end-of-sequence token."""
    if eos_token_id is None:
        return tokens
    return tokens[: _end_of_turn(tokens, eos_token_id)] if eos_token_id in tokens else [*tokens, eos_token_id]


def _end_of_turn(tokens: Sequence[int], eos_token_id: int | None) -> int:
    """Tokens up to and with the last end-of-sequence token; all where there is none."""
    return len(tokens) - tokens[::-1].index(eos_token_id) if eos_token_id in tokens else len(tokens)


def _require_words(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    is_empty = not content.strip() if isinstance(content, str) else not content
    if is_empty and not message.get("tool_calls"):
        raise DataError(
            where,
            got="an empty turn of the assistant",
            expected="something to learn: text, or tool_calls",
            fix="Correct the row or leave it out: the model would learn to answer nothing.",
        )


def _rendered(
    encoder: ChatEncoder, messages: Messages, where: str, tools: Sequence[Any] | None, *, is_question: bool
) -> str:
    told = {"tools": list(tools)} if tools else {}
    kwargs = encoder.template_kwargs | {"add_generation_prompt": is_question} | told
    return ChatEncoder(encoder.tokenizer, kwargs).render(messages, where=where)


def _rewritten(where: str, turn: int, shorter: str, longer: str) -> DataError:
    place = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return DataError(
        f"{where}, message {turn}",
        got=f"a chat template that changes earlier turns: {shorter[place : place + 40]!r} became "
        f"{longer[place : place + 40]!r} when the turn was added",
        expected="turns that stay as they were written, so that each is learned as the model would have said it",
        fix="Give each answer a row of its own that ends with it, change data.apply_chat_template_kwargs, or set "
        "model.custom_chat_template to a template that only adds.",
    )
