# SPDX-License-Identifier: Apache-2.0
"""Validation: answer every held-out prompt with the validation's own sampling, grade, and count."""

from collections.abc import Hashable
from typing import Any

from quadriga.config import Config
from quadriga.observe.metrics import reduce_metrics
from quadriga.observe.progress import Progress
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager
from quadriga.trainer.answers import RolloutAnswers, named
from quadriga.trainer.rewards import grade
from quadriga.trainer.samples import first_of_each_prompt, sample_rows, write_samples
from quadriga.trainer.validation_metrics import validation_metrics
from quadriga.workers import ActorRolloutRefWorker, RolloutWorker


class Validator:
    """Runs a policy over the validation data.

    Args:
        config: of the run.
        tokenizer: of the model.
        rollout: generates.
        reward: grades.
        dataloader: batches of prompts, or None: there is no validation data.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        rollout: ActorRolloutRefWorker | RolloutWorker,
        reward: RewardManager,
        dataloader: Any,
    ) -> None:
        self.config, self.tokenizer, self.answers = config, tokenizer, RolloutAnswers(rollout, config)
        self.reward, self.dataloader = reward, dataloader

    def run(self, step: int, progress: Progress) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics, and the rows that trackers show; all rows go to `trainer.validation_data_dir` where one is set."""
        rows: list[dict[str, Any]] = []
        errors: dict[str, float] = {}
        for number, batch_dict in enumerate(self.dataloader or ()):
            batch = self._answer(DataProto.from_single_dict(batch_dict), step, number)
            reward = grade(self.reward, batch)
            rows += sample_rows(batch, self.tokenizer, self.config.data.reward_fn_key)
            for name, value in reduce_metrics(reward.metrics).items():
                if name == "reward/errors":
                    errors[f"val-aux/{name}"] = errors.get(f"val-aux/{name}", 0.0) + value
        if not rows:
            return {}, []
        trainer = self.config.trainer
        if trainer.validation_data_dir:
            write_samples(trainer.validation_data_dir, step, rows)
        metrics = validation_metrics(
            [row["data_source"] for row in rows],
            [row["uid"] for row in rows],
            {"reward": [row["score"] for row in rows], **_numeric_columns(rows)},
            [_comparable(row.get("pred")) for row in rows] if any("pred" in row for row in rows) else None,
        )
        return metrics | errors, list(first_of_each_prompt(rows, trainer.log_val_generations))

    def _answer(self, batch: DataProto, step: int, number: int) -> DataProto:
        sampling = self.config.actor_rollout_ref.rollout.val_kwargs
        named(batch, f"val-{number}")
        batch.meta_info |= {"global_steps": step, "validate": True, "do_sample": sampling.do_sample}
        return self.answers(batch, sampling.n)


def _comparable(prediction: Any) -> Hashable:
    """What is counted as equal answers: graders may return lists, whose elements count."""
    try:
        hash(prediction)
    except TypeError:
        return repr(prediction)
    return prediction


_NOT_MEASURED = frozenset(
    ("uid", "data_source", "input", "output", "ground_truth", "score", "finish_reason", "reward_error", "pred")
)


def _numeric_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What the grader added beside the score; columns that are no numbers are left out further on."""
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_MEASURED)
    return {name: [row.get(name) for row in rows] for name in names}
