# SPDX-License-Identifier: Apache-2.0
"""A tool that knows the right answer, for rows of `quadriga prepare data gsm8k_tools`."""

from quadriga.rewards.graders.gsm8k import compute_score
from quadriga.rollout.agent_loop import Tool


class CheckAnswer(Tool):
    """Says whether an answer is right."""

    name = "check_answer"

    def create(self, ground_truth: str) -> None:
        """Gets the answer of the sample, by its `tools_kwargs`."""
        self.ground_truth, self.score = ground_truth, 0.0

    def execute(self, answer: str) -> str:
        """Find out whether an answer is right.

        Args:
            answer: the final number.
        """
        self.score = compute_score(f"#### {answer}", self.ground_truth)["score"]
        return "This is right." if self.score == 1 else "This is wrong."

    def calc_reward(self) -> float:
        """1 if the answer that was checked last is right, else 0."""
        return self.score
