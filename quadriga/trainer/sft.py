# SPDX-License-Identifier: Apache-2.0
"""The loops of `quadriga sft`: rows -> a batch -> one optimizer step; validation, checkpoints and tracking as in
`quadriga train`.

    SupervisedTrainer     the loop
      SFTTrainer          conversations: the likelihood of the assistant's tokens
      RewardModelTrainer  pairs of responses to a prompt: the better one is to get the higher score

Reward models: Bradley, Terry, 1952; arXiv:2203.02155, equation 1. The probability that the first of two responses is
the better one is sigmoid(score of the first - score of the second); the loss is the negative log of it, averaged over
pairs.

    scores, without gradients  ->  on the driver: loss of each pair, and its slope by each score  ->  slope x score
                                                                                                       with gradients

The second pass has the gradient of the loss, exactly, and pairs need not stay together on the way: a response may be in
another micro-batch, or on another rank, than the one that it is compared with. The price is the first pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from quadriga.config import Config
from quadriga.errors import DataError, EngineError
from quadriga.observe.metrics import reduce_metrics
from quadriga.observe.watchdog import watched
from quadriga.protocol import DataProto
from quadriga.trainer.loop import Step, TrainingLoop
from quadriga.trainer.metrics import lost_gradients
from quadriga.workers.reward_model import SequenceTokens, sequences_batch


class SupervisedTrainer(TrainingLoop, ABC):
    """The loop of supervised training: a subclass defines `step` and `judge`.

    `learner` is the handle of the workers; `train_dataloader` is stateful, and its batches are dictionaries of columns;
    `val_dataloader` is the same, or None.
    """

    def __init__(
        self,
        config: Config,
        learner: Any,
        train_dataloader: Any,
        val_dataloader: Any,
        total_training_steps: int,
    ) -> None:
        self.learner, self.train_dataloader, self.val_dataloader = (
            learner,
            train_dataloader,
            val_dataloader,
        )
        super().__init__(
            config, {"actor": learner}, total_training_steps, {"loader": train_dataloader}
        )

    @abstractmethod
    def step(self, rows: DataProto) -> int:
        """Update the model on a batch of rows, and add to `metrics`. Returns the number of its tokens."""

    @abstractmethod
    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        """Sum and count of each metric of validation rows."""

    def steps(self) -> Iterator[Step]:
        """As `TrainingLoop.steps`; behind the last step the model is written."""
        self.load_checkpoint()
        with self.reporting():
            if (
                self.val_dataloader is not None
                and self.settings.val_before_train
                and self.global_steps == 0
            ):
                self.tracking.log(self.validate(), 0)
            while not self.is_last_step:
                for columns in watched(self.train_dataloader, "a batch of training rows"):
                    rows = DataProto.from_single_dict(columns)
                    is_skipped = self.skips_next_step
                    if is_skipped:
                        self.skip_step(lambda _, rows=rows: self.rows_to_skip(rows))
                    else:
                        self.train_step(rows)
                    self.finish_step()
                    yield Step(self, None if is_skipped else rows)
                    if self.is_stopping:
                        raise KeyboardInterrupt
                    if self.is_last_step:
                        break
            self.saver.finish()
            self.write_model()

    def train_step(self, rows: DataProto) -> None:
        """The next step, measured: afterwards `metrics` holds its numbers."""
        with self.measured():
            num_tokens = self.step(rows)
        seconds = self.timer.seconds["step"]
        self.metrics |= {
            f"timing_s/{phase}": duration for phase, duration in self.timer.seconds.items()
        }
        self.metrics |= {
            "perf/total_num_tokens": float(num_tokens),
            "perf/time_per_step": seconds,
            "perf/throughput": num_tokens / seconds,
            "training/global_step": self.global_steps,
            "training/epoch": (self.global_steps - 1) // max(1, len(self.train_dataloader)),
        }

    def rows_to_skip(self, rows: DataProto) -> list[dict[str, Any]]:
        """The sequences of rows that are skipped, as texts."""
        decode, texts = self.train_dataloader.dataset.tokenizer.decode, []
        masks = rows.batch["attention_mask"].bool()
        for ids, mask in zip(rows.batch["input_ids"], masks, strict=True):
            # One sequence, or two that are compared.
            pairs = zip(ids.view(-1, ids.shape[-1]), mask.view(-1, ids.shape[-1]), strict=True)
            texts.append({"texts": [decode(sequence[own]) for sequence, own in pairs]})
        return texts

    def finish_step(self) -> None:
        """Validate, report, and begin to save."""
        self.saver.poll()
        is_at_end = self.is_last_step and self.val_dataloader is not None
        if is_at_end or self.is_due(self.settings.test_freq):
            self.metrics |= self.validate()
        self.log_step()
        self.save_where_due()

    def update(self, batch: DataProto) -> None:
        """One optimizer step on the rows of a batch."""
        batch.meta_info |= {
            "global_steps": self.global_steps,
            "total_training_steps": self.total_training_steps,
        }
        with self.timer.phase("update"):
            self.metrics |= reduce_metrics(self.learner.update(batch).meta_info.pop("metrics", {}))
        self.warn_once(lost_gradients(self.metrics))

    def validate(self) -> dict[str, float]:
        """The metrics of all validation rows; none where there are no rows."""
        if self.val_dataloader is None:
            return {}
        sums: dict[str, list[float]] = {}
        with self.timer.phase("validation"):
            for columns in watched(self.val_dataloader, "a batch of validation rows"):
                for name, (total, count) in self.judge(DataProto.from_single_dict(columns)).items():
                    entry = sums.setdefault(f"val/{name}", [0.0, 0.0])
                    entry[0], entry[1] = entry[0] + total, entry[1] + count
        metrics = {name: total / count for name, (total, count) in sums.items()}
        shown = "   ".join(
            f"{name.removeprefix('val/')} {value:.4f}" for name, value in metrics.items()
        )
        self.progress.message(f"validation at step {self.global_steps}: {shown}")
        return metrics


class SFTTrainer(SupervisedTrainer):
    """Supervised fine-tuning: the tokens under `loss_mask`. Validation has `loss`, nats for each of them."""

    def step(self, rows: DataProto) -> int:
        self.update(conversations_batch(rows))
        return int(rows.batch["attention_mask"].sum())

    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        batch = conversations_batch(rows)
        log_probs = self.learner.predict(batch).batch["old_log_probs"]
        loss, num_tokens = (
            -float(log_probs.double().sum()),
            float(batch.batch["response_mask"].sum()),
        )
        if not torch.isfinite(torch.tensor(loss)):
            raise EngineError(
                "validation",
                got=f"a loss of {loss}",
                expected="a finite one",
                fix="Lower optim.lr.",
            )
        return {"loss": (loss, num_tokens)}


def conversations_batch(rows: DataProto) -> DataProto:
    """Rows of a conversation data set as the engine reads them: a first token, and all behind it as its response.

    `rows`: `input_ids`, `attention_mask`, `position_ids` and `loss_mask` [B, L], padded on the right; positions may be
    [B, 3, L], with `multi_modal_inputs`.
    Returns the same columns without those that are padding in every row, and `response_mask` [B, T] for `loss_mask`.
    """
    width = int(rows.batch["attention_mask"].sum(-1).max())
    if width < 2:
        raise DataError("a batch", got="rows of one token", expected="a question and an answer")
    tensors = {
        key: rows.batch[key][..., :width] for key in ("input_ids", "attention_mask", "position_ids")
    }
    tensors["response_mask"] = rows.batch["loss_mask"][:, 1:width]
    return DataProto.from_dict(tensors=tensors, non_tensors=rows.non_tensor_batch)


class RewardModelTrainer(SupervisedTrainer):
    """Training of reward models. Validation has `loss`, and `accuracy`, the share of pairs in the right order."""

    def step(self, rows: DataProto) -> int:
        batch = pairs_batch(rows)
        with self.timer.phase("scores"):
            scores = self._scores(batch)
        losses, slopes = bradley_terry(scores)
        margins = scores[:, 0] - scores[:, 1]
        self.metrics |= {
            "train/loss": float(losses.mean()),
            "train/accuracy": float((margins > 0).float().mean()),
            "train/margin": float(margins.mean()),
            "train/score": float(scores.mean()),
        }
        batch.batch["score_slope"] = slopes.flatten()
        self.update(batch)
        return int(rows.batch["attention_mask"].sum())

    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        scores = self._scores(pairs_batch(rows))
        losses, _ = bradley_terry(scores)
        num_right = float((scores[:, 0] > scores[:, 1]).sum())
        return {"loss": (float(losses.sum()), len(losses)), "accuracy": (num_right, len(losses))}

    def _scores(self, batch: DataProto) -> torch.Tensor:
        """[pairs, 2], the better response's first."""
        scores = self.learner.predict(batch).batch["rm_scores"].sum(-1)
        if not torch.isfinite(scores).all():
            count = int((~torch.isfinite(scores)).sum())
            got = f"{count} of {len(scores)} scores that are not finite"
            fix = "Lower optim.lr, or set engine.fsdp_config.model_dtype=float32."
            raise EngineError("reward model", got=got, expected="finite scores", fix=fix)
        return scores.view(-1, 2)


def bradley_terry(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [pairs], and slopes [pairs, 2], the derivative of the mean loss by each score.

    `scores` are [pairs, 2], the better response's first.
    """
    margins = scores[:, 0] - scores[:, 1]
    wrong = torch.sigmoid(-margins) / len(margins)
    return -logsigmoid(margins), torch.stack([-wrong, wrong], dim=-1)


def pairs_batch(rows: DataProto) -> DataProto:
    """Pairs as the engine reads them: two rows each, the better response first.

    `rows` have `input_ids`, `attention_mask` and `position_ids` [B, 2, L], and `num_prompt_tokens` [B]; of a
    vision-language model positions are [B, 2, 3, L], and there are `multi_modal_inputs`.
    """
    sequences, given = [], rows.non_tensor_batch.get("multi_modal_inputs", [None] * len(rows))
    columns = (
        rows.batch[key]
        for key in ("input_ids", "attention_mask", "position_ids", "num_prompt_tokens")
    )
    for *both, num_prompt, inputs in zip(*columns, given, strict=True):
        for row, mask, positions in zip(*both, strict=True):
            ids, start = row[mask.bool()].tolist(), int(num_prompt)
            axes = None if inputs is None else positions[:, mask.bool()]
            sequences.append(SequenceTokens(ids[:start], ids[start:], axes, inputs or {}))
    return sequences_batch(sequences)
