# SPDX-License-Identifier: Apache-2.0
"""Encoders of tests that travel to other processes, which import this module and nothing heavier."""

import os
import signal

from quadriga.data.token_counts import TokenCounter
from quadriga.data.tokenizing import ChatEncoder


class CountingEncoder(ChatEncoder):
    """Counts the texts that are tokenized."""

    num_texts = 0

    @property
    def counter(self):
        return self

    def bounds(self, texts: list[str], limit: int | None):
        self.num_texts += len(texts)
        return TokenCounter(self.tokenizer).bounds(texts, limit)


class FailingEncoder(ChatEncoder):
    """Raises at a row of two words, or kills its process, as `act` says."""

    act = ""

    def render(self, messages, *, where: str, **options) -> str:
        text = super().render(messages, where=where, **options)
        if messages[0]["content"].count(" ") == 1:
            if self.act == "raise":
                raise RuntimeError("no tokens today")
            if self.act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return text
