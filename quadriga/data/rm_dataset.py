# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: two responses to one prompt, as tokens.

Shapes: L tokens of one sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.data.sft_dataset import ASSISTANT, RowMedia, TextPart, TokenizedRows, conversation
from quadriga.data.tokenizing import Messages, as_messages
from quadriga.errors import DataError


class Pair(NamedTuple):
    """Token ids, int32 [L]: of the prompt, of the better response and of the worse one; and what the prompt shows."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    media: RowMedia | None = None


class RMDataset(TokenizedRows[Pair]):
    """Preference pairs: two responses to one prompt, the better one and the worse one.

        prompt     text or chat messages; may be missing where the responses are whole chats
        chosen     the better response: text, a list with the assistant's message, or a whole chat
        rejected   the worse one, in the same form

    Read in the tokens that a rollout would have: the rendered prompt, then the response up to its end of sequence.
    Arguments as for `TokenizedRows`.
    Raises DataError: also for a pair of equal responses, from which nothing can be learned."""

    columns = ("chosen_key", "rejected_key")

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Pair `item`, padded on the right to `data.max_length` = L.
        Returns `input_ids`, `attention_mask` and `position_ids`, int64 [2, L], the better response first; and
        `num_prompt_tokens`, int64 [], with which both begin. With a processor positions are [2, 3, L], and there are
        `multi_modal_inputs`."""
        pair = self.rows[item]
        sequences = [
            np.concatenate([pair.prompt, response]) for response in (pair.chosen, pair.rejected)
        ]
        return {
            **self.padded(sequences, pair.media),
            "num_prompt_tokens": torch.tensor(len(pair.prompt)),
        }

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        chats: list[tuple[str, Messages]] = []
        for key in self.columns:
            column = getattr(self.config, key)
            place, prompt, response = (
                f"{where}, {column}",
                row.get(self.config.prompt_key),
                row[column],
            )
            before = [] if prompt is None else as_messages(prompt, where=place)
            if isinstance(response, str):
                if not before:
                    got = "a response in text, without a prompt"
                    fix = "Name the column of the prompts with data.prompt_key."
                    raise DataError(
                        place,
                        got=got,
                        expected="a prompt in the same row, or a whole chat",
                        fix=fix,
                    )
                messages = [*before, {"role": ASSISTANT, "content": response}]
            else:
                chat = as_messages(response, where=place, key=key)
                # Some data sets repeat the prompt in front of each response.
                messages = chat if chat[: len(before)] == before else [*before, *chat]
            chats.append((place, messages))
        return chats

    def made(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> Pair:
        if parts[0].text != parts[2].text:
            expected = "responses to one prompt: chats that differ in the last turn only"
            raise DataError(
                where,
                got="two responses to different prompts",
                expected=expected,
                fix="Correct the row.",
            )
        if self.processor and not set(self.processor.media_ids).isdisjoint(
            [*tokens[1], *tokens[3]]
        ):
            expected = "text, to a prompt that may have some"
            raise DataError(
                where,
                got="images or videos in a response",
                expected=expected,
                fix="Leave the row out.",
            )
        ends = (self.tokenizer.eos_token_id, self.stop_token_ids)
        chosen, rejected = (
            conversation(tokens[i : i + 2], [False, True], *ends).ids[len(tokens[i]) :]
            for i in (0, 2)
        )
        if np.array_equal(chosen, rejected):
            got, expected = (
                f"two equal responses, {parts[1].text[:60]!r}",
                "a better one and a worse one",
            )
            raise DataError(
                where,
                got=got,
                expected=expected,
                fix="Leave the row out: nothing can be learned from it.",
            )
        return Pair(np.array(tokens[0], dtype=np.int32), chosen, rejected, media)

    def num_tokens(self, row: Pair) -> int:
        return len(row.prompt) + max(len(row.chosen), len(row.rejected))

    def cut(self, row: Pair) -> Pair | None:
        # The prompt loses its beginning; one token of it must be left.
        kept = len(row.prompt) - (self.num_tokens(row) - self.config.max_length)
        return Pair(row.prompt[-kept:], row.chosen, row.rejected) if kept > 0 else None
