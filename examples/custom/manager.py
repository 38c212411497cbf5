# SPDX-License-Identifier: Apache-2.0
"""A reward manager of your own: responses of a batch that say the same share the score of one."""

from collections import Counter

from quadriga.rewards.managers.naive import NaiveRewardManager


class Originality(NaiveRewardManager):
    """Grades as `naive` does, and divides each score by the number of equal responses.

    Option (`reward_model.reward_kwargs`): `ignore_case`, by default true.
    """

    options = ("ignore_case",)

    def __init__(self, config, tokenizer):
        super().__init__(config, tokenizer)
        self._ignore_case = self.settings.reward_kwargs.get("ignore_case", True)

    def shaped(self, outcomes, samples):
        texts = [" ".join(row["solution_str"].split()) for row in samples.rows]
        if self._ignore_case:
            texts = [text.lower() for text in texts]
        counts = Counter(texts)
        shaped = []
        for outcome, text in zip(outcomes, texts, strict=True):
            # A response that could not be graded keeps its error.
            if not outcome.error:
                score = outcome.score / counts[text]
                extra = {**outcome.extra, "acc": outcome.score, "copies": counts[text]}
                outcome = outcome._replace(score=score, extra=extra)
            shaped.append(outcome)
        return shaped
