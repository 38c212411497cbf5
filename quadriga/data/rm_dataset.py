# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to one prompt, the better one and the worse one.

    prompt     text or chat messages; may be missing where the answers are whole chats
    chosen     the better answer: text, a list with the assistant's message, or a whole chat
    rejected   the worse one, in the same form

Read in the tokens that a rollout would have: the rendered prompt, then the answer up to its end of sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quadriga.data.conversation import TextPart, chat_of_row, conversation, text_parts
from quadriga.data.sft_dataset import TokenizedRows
from quadriga.data.tokenizing import Messages, as_messages
from quadriga.errors import DataError


@dataclass(frozen=True)
class Pair:
    """Token ids, int32: of the prompt, of the better answer and of the worse one."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


class RMDataset(TokenizedRows[Pair]):
    """Preference pairs. Arguments: see `TokenizedRows`.

    Raises:
        DataError: also for a pair of equal answers, from which nothing can be learned.
    """

    columns = ("chosen_key", "rejected_key")

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Pair `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask` and `position_ids`, int64 [2, L], the better answer first; and
            `num_prompt_tokens`, int64 [], with which both begin.
        """
        pair, length = self.rows[item], self.config.max_length
        input_ids = torch.full((2, length), int(self.tokenizer.pad_token_id), dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for number, answer in enumerate((pair.chosen, pair.rejected)):
            tokens = np.concatenate([pair.prompt, answer])
            input_ids[number, : len(tokens)] = torch.from_numpy(tokens)
            attention_mask[number, : len(tokens)] = 1
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": torch.arange(length) * attention_mask,
            "num_prompt_tokens": torch.tensor(len(pair.prompt)),
        }

    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        """See `TokenizedRows.parts_of`: prompt and answer of the better one, then of the worse one."""
        parts = []
        for key in (self.config.chosen_key, self.config.rejected_key):
            messages = self._chat(row.get(self.config.prompt_key), row[key], f"{where}, {key}")
            *before, answer = text_parts(messages, self.encoder, where=f"{where}, {key}")
            parts += [TextPart("".join(part.text for part in before), False), answer]
        if parts[0].text != parts[2].text:
            raise DataError(
                where,
                got="two answers to different prompts",
                expected="answers to one prompt: chats that differ in the last turn only",
                fix="Correct the row.",
            )
        return parts

    def _chat(self, prompt: Any, answer: Any, where: str) -> Messages:
        before = [] if prompt is None else as_messages(prompt, where=where)
        if isinstance(answer, str):
            if not before:
                raise DataError(
                    where,
                    got="an answer in text, without a prompt",
                    expected="a prompt beside it, or a whole chat",
                    fix="Name the column of the prompts with data.prompt_key.",
                )
            return [*before, {"role": "assistant", "content": answer}]
        chat = chat_of_row(answer, where=where)
        # Some data sets repeat the prompt in front of each answer.
        return chat if chat[: len(before)] == before else [*before, *chat]

    def made(self, parts: Sequence[TextPart], tokens: Sequence[list[int]], where: str) -> Pair:
        """See `TokenizedRows.made`."""
        eos = self.tokenizer.eos_token_id
        chosen, rejected = (
            conversation(tokens[at : at + 2], [False, True], eos).ids[len(tokens[at]) :] for at in (0, 2)
        )
        if np.array_equal(chosen, rejected):
            raise DataError(
                where,
                got=f"two equal answers, {parts[1].text[:60]!r}",
                expected="a better one and a worse one",
                fix="Leave the row out: nothing can be learned from it.",
            )
        return Pair(np.array(tokens[0], dtype=np.int32), chosen, rejected)

    def num_tokens(self, row: Pair) -> int:
        """See `TokenizedRows.num_tokens`."""
        return len(row.prompt) + max(len(row.chosen), len(row.rejected))

    def cut(self, row: Pair) -> Pair | None:
        """See `TokenizedRows.cut`: the prompt loses its beginning; one token of it must be left."""
        kept = len(row.prompt) - (self.num_tokens(row) - self.config.max_length)
        return Pair(row.prompt[-kept:], row.chosen, row.rejected) if kept > 0 else None

    def contents(self, row: Pair) -> Iterator[np.ndarray]:
        """See `TokenizedRows.contents`."""
        yield from (row.prompt, row.chosen, row.rejected)
