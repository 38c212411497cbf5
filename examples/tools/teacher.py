# SPDX-License-Identifier: Apache-2.0
"""A user simulator that tells the model that its answer is wrong, and lets it try again."""

from typing import Any

from quadriga.rollout.agent_loop import Interaction, Reply


class Teacher(Interaction):
    """Scores each answer; a sample asks for it by `interaction_kwargs={"name": "teacher", "answer": "42"}`."""

    def __init__(self, patience: int = 2) -> None:
        self.patience = patience

    def start_interaction(self, answer: str) -> None:
        """Keeps the right answer."""
        self.answer = answer

    def generate_response(self, messages: list[dict[str, Any]]) -> Reply:
        """Over once the answer is right, or patience is at its end."""
        if self.answer in messages[-1]["content"]:
            return Reply(score=1.0, is_over=True)
        self.patience -= 1
        return Reply("That is not right. Think again.", score=0.0, is_over=self.patience <= 0)
