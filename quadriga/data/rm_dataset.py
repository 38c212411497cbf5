# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: two responses to one prompt, as tokens.

Shapes: L tokens of one sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.data.sft_dataset import ASSISTANT, RowMedia, TextPart, TokenizedRows, join_parts
from quadriga.data.tokenizing import Messages, as_messages
from quadriga.errors import DataError


class TokenizedPair(NamedTuple):
    """Token ids of a prompt and of two responses to the prompt, int32 [L] each.

    Attributes:
        prompt: the rendered prompt.
        chosen: the better response.
        rejected: the worse response.
        media: images and videos of the prompt. None: there are none.
    """

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    media: RowMedia | None = None


class RMDataset(TokenizedRows[TokenizedPair]):
    """Preference pairs: two responses to one prompt, the better one and the worse one.

        prompt     text or chat messages; may be missing where the responses are whole chats
        chosen     the better response: text, a list with the assistant's message, or a whole chat
        rejected   the worse one, in the same form

    The tokens are the same as in a rollout: the rendered prompt, then the response up to the end of
    sequence. Arguments as for `TokenizedRows`.

    Raises:
        DataError: as for `TokenizedRows`. A pair of equal responses is a bad row, too: nothing can
            be learned from it.
    """

    columns = ("chosen_key", "rejected_key")

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Pair `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask` and `position_ids`, int64 [2, L]: the prompt with the
            better response, then with the worse one. `num_prompt_tokens`, int64 []: the length of
            the prompt. With a processor positions are [2, 3, L], and there are
            `multi_modal_inputs`.
        """
        pair = self.rows[item]
        # The prompt is stored once per pair, and repeated only here.
        sequences = [
            np.concatenate([pair.prompt, pair.chosen]),
            np.concatenate([pair.prompt, pair.rejected]),
        ]
        columns = self.pad(sequences, pair.media)
        return {**columns, "num_prompt_tokens": torch.tensor(len(pair.prompt))}

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        """Build two chats: the prompt with the better response, and with the worse one.

        Args:
            row: values by column.
            where: the row, for errors.

        Returns:
            For each chat its place, for errors, and its messages.

        Raises:
            DataError: a response is text without a prompt, or has another form.
        """
        chats = []
        for key in self.columns:
            column = getattr(self.config, key)
            place = f"{where}, {column}"
            response = row[column]
            prompt = row.get(self.config.prompt_key)
            prompt_messages = []
            if prompt is not None:
                prompt_messages = as_messages(prompt, where=place)
            if isinstance(response, str):
                if not prompt_messages:
                    raise DataError(
                        place,
                        got="a response in text, without a prompt",
                        expected="a prompt in the same row, or a whole chat",
                        fix="Name the column of the prompts with data.prompt_key.",
                    )
                messages = [*prompt_messages, {"role": ASSISTANT, "content": response}]
            else:
                messages = as_messages(response, where=place, key=key)
                # Some data sets repeat the prompt in front of each response.
                if messages[: len(prompt_messages)] != prompt_messages:
                    messages = [*prompt_messages, *messages]
            chats.append((place, messages))
        return chats

    def build_row(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> TokenizedPair:
        # Each of the two chats has two parts: the prompt, and the last turn of the assistant.
        prompt, chosen, rejected_prompt, _ = parts
        prompt_ids, chosen_ids, rejected_prompt_ids, rejected_ids = tokens
        # Only the prompt of the first chat is stored, so the other has to be equal.
        if prompt.text != rejected_prompt.text:
            raise DataError(
                where,
                got="two responses to different prompts",
                expected="responses to one prompt: chats that differ in the last turn only",
                fix="Correct the row.",
            )
        if self.processor:
            response_ids = {*chosen_ids, *rejected_ids}
            if not response_ids.isdisjoint(self.processor.media_ids):
                raise DataError(
                    where,
                    got="images or videos in a response",
                    expected="text, to a prompt that may have some",
                    fix="Leave the row out.",
                )
        chosen_response = self._end_response(prompt_ids, chosen_ids)
        rejected_response = self._end_response(rejected_prompt_ids, rejected_ids)
        if np.array_equal(chosen_response, rejected_response):
            raise DataError(
                where,
                got=f"two equal responses, {chosen.text[:60]!r}",
                expected="a better one and a worse one",
                fix="Leave the row out: nothing can be learned from it.",
            )
        prompt_array = np.array(prompt_ids, dtype=np.int32)
        return TokenizedPair(prompt_array, chosen_response, rejected_response, media)

    def _end_response(self, prompt_ids: list[int], response_ids: list[int]) -> np.ndarray:
        """Token ids of a response up to the end of sequence, which is appended if missing, [L]."""
        joined = join_parts(
            [prompt_ids, response_ids],
            [False, True],  # only the second part is a response
            self.tokenizer.eos_token_id,
            self.stop_token_ids,
        )
        return joined.ids[len(prompt_ids) :]

    def num_tokens(self, row: TokenizedPair) -> int:
        """Length of the longer of the two sequences."""
        return len(row.prompt) + max(len(row.chosen), len(row.rejected))

    def cut(self, row: TokenizedPair) -> TokenizedPair | None:
        """Drop the beginning of the prompt, so that both sequences have at most `data.max_length`.

        None: the longer response alone is too long.
        """
        # The result has no media, because rows with images or videos are never cut.
        num_excess = self.num_tokens(row) - self.config.max_length
        num_remaining = len(row.prompt) - num_excess
        # One token of the prompt must remain, which predicts the first token of the response.
        if num_remaining <= 0:
            return None
        return TokenizedPair(row.prompt[-num_remaining:], row.chosen, row.rejected)
