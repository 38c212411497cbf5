# SPDX-License-Identifier: Apache-2.0
"""Training loops of `quadriga sft`: each step is one optimizer step on a batch of rows.

Validation, checkpoints and tracking work as in `quadriga train`.

    SupervisedTrainer     the loop
      SFTTrainer          conversations: maximizes the likelihood of the assistant's tokens
      RewardModelTrainer  pairs of responses to a prompt: the better one should score higher

Reward models: Bradley, Terry, 1952; arXiv:2203.02155, equation 1. The probability that the first of
two responses is the better one is sigmoid(score of the first - score of the second); the loss is
its negative log, averaged over pairs. A step makes two passes:

    scores, without gradients
      -> on the driver: loss of each pair, and its slope with respect to each score
      -> slope x score, with gradients

The second pass has exactly the gradient of the loss, and the rows of a pair need not stay together:
the responses of a pair may be in different micro-batches, or on different ranks. The cost is the
first pass.

Legend: B rows, L positions of a sequence, T response positions.
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
from quadriga.trainer.loop import TrainingLoop, TrainingStep
from quadriga.trainer.metrics import lost_gradients
from quadriga.workers.reward_model import SequenceTokens, sequences_batch


class SupervisedTrainer(TrainingLoop, ABC):
    """The loop of supervised training: a subclass defines `step` and `judge`.

    Args:
        config: the resolved configuration.
        learner: handle of the workers.
        train_dataloader: stateful; its batches are dictionaries of columns.
        val_dataloader: the same, or None.
        total_training_steps: number of the last step.
    """

    def __init__(
        self,
        config: Config,
        learner: Any,
        train_dataloader: Any,
        val_dataloader: Any,
        total_training_steps: int,
    ) -> None:
        self.learner = learner
        self.train_dataloader = train_dataloader
        self.val_dataloader = val_dataloader
        resumable = {"loader": train_dataloader}
        super().__init__(config, {"actor": learner}, total_training_steps, resumable)

    @abstractmethod
    def step(self, rows: DataProto) -> int:
        """Update the model on a batch, and add to `metrics`. Returns the batch's number of tokens."""

    @abstractmethod
    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        """Evaluate the model on validation rows.

        Returns:
            For each metric its sum over the rows, and the count by which the sum is divided.
        """

    def steps(self) -> Iterator[TrainingStep]:
        """Train step by step, validate where it is due, and write the final model."""
        self.load_checkpoint()
        validates_first = self.settings.val_before_train and self.val_dataloader is not None
        with self.reporting():
            if validates_first and self.global_steps == 0:
                self.tracking.log(self.validate(), 0)
            # Each round is a pass over the data; the first one may begin in the middle.
            while not self.is_last_step:
                for columns in watched(self.train_dataloader, "a batch of training rows"):
                    rows = DataProto.from_single_dict(columns)
                    batch = None
                    if self.skips_next_step:
                        # The number of rows is not used: a step always takes one batch.
                        self.skip_step(lambda _, rows=rows: self.rows_to_skip(rows))
                    else:
                        self.train_step(rows)
                        batch = rows
                    self.finish_step()
                    yield TrainingStep(self, batch)
                    # A requested stop ends the run like Ctrl-C, after the step.
                    if self.is_stopping:
                        raise KeyboardInterrupt
                    if self.is_last_step:
                        break
            self.saver.finish()
            self.write_model()

    def train_step(self, rows: DataProto) -> None:
        """Take and measure the next step; its metrics are in `metrics` afterwards."""
        with self.measured():
            num_tokens = self.step(rows)
        for phase, duration in self.timer.seconds.items():
            self.metrics[f"timing_s/{phase}"] = duration
        seconds = self.timer.seconds["step"]
        self.metrics |= {
            "perf/total_num_tokens": float(num_tokens),
            "perf/time_per_step": seconds,
            "perf/throughput": num_tokens / seconds,
            "training/global_step": self.global_steps,
            "training/epoch": (self.global_steps - 1) // max(1, len(self.train_dataloader)),
        }

    def rows_to_skip(self, rows: DataProto) -> list[dict[str, Any]]:
        """Decode the rows of a skipped step for the quarantine.

        Returns:
            For each row a dictionary with the list `texts`: one text, or both texts of a pair.
        """
        tokenizer = self.train_dataloader.dataset.tokenizer
        width = rows.batch["input_ids"].shape[-1]
        masks = rows.batch["attention_mask"].bool()
        decoded_rows = []
        for ids, mask in zip(rows.batch["input_ids"], masks, strict=True):
            texts = []
            # A row has one sequence [L], or a pair [2, L].
            for tokens, is_token in zip(ids.view(-1, width), mask.view(-1, width), strict=True):
                texts.append(tokenizer.decode(tokens[is_token]))
            decoded_rows.append({"texts": texts})
        return decoded_rows

    def finish_step(self) -> None:
        """Validate, report, and start a checkpoint, each where it is due."""
        self.saver.poll()
        # The final model is validated even if `test_freq` is -1.
        is_at_end = self.is_last_step and self.val_dataloader is not None
        if is_at_end or self.is_due(self.settings.test_freq):
            self.metrics |= self.validate()
        self.log_step()
        self.save_where_due()

    def update(self, batch: DataProto) -> None:
        """Take one optimizer step on the rows of a batch."""
        batch.meta_info["global_steps"] = self.global_steps
        batch.meta_info["total_training_steps"] = self.total_training_steps
        with self.timer.phase("update"):
            self.metrics |= reduce_metrics(self.learner.update(batch).meta_info.pop("metrics", {}))
        self.warn_once(lost_gradients(self.metrics))

    def validate(self) -> dict[str, float]:
        """Evaluate the model on all validation rows. Returns metrics; empty without such rows."""
        if self.val_dataloader is None:
            return {}
        # Batches differ in their counts, so means are taken only at the end.
        sums = {}
        counts = {}
        with self.timer.phase("validation"):
            for columns in watched(self.val_dataloader, "a batch of validation rows"):
                for name, (total, count) in self.judge(DataProto.from_single_dict(columns)).items():
                    sums[name] = sums.get(name, 0.0) + total
                    counts[name] = counts.get(name, 0.0) + count
        means = {name: total / counts[name] for name, total in sums.items()}
        summary = "   ".join(f"{name} {value:.4f}" for name, value in means.items())
        self.progress.message(f"validation at step {self.global_steps}: {summary}")
        return {f"val/{name}": value for name, value in means.items()}


class SFTTrainer(SupervisedTrainer):
    """Supervised fine-tuning on the tokens of `loss_mask`.

    Validation has `loss`, in nats per token.
    """

    def step(self, rows: DataProto) -> int:
        """Take an optimizer step on conversations. Returns the number of tokens."""
        self.update(conversations_batch(rows))
        return int(rows.batch["attention_mask"].sum())

    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        """Sum of the losses of the trained tokens, in nats, and their number."""
        batch = conversations_batch(rows)
        log_probs = self.learner.predict(batch).batch["old_log_probs"]
        # Log-probs of tokens that are not trained are 0.
        loss = -float(log_probs.double().sum())
        if not torch.isfinite(torch.tensor(loss)):
            raise EngineError(
                "validation",
                got=f"a loss of {loss}",
                expected="a finite one",
                fix="Lower optim.lr.",
            )
        return {"loss": (loss, float(batch.batch["response_mask"].sum()))}


def conversations_batch(rows: DataProto) -> DataProto:
    """Convert conversations to the engine's format: a prompt of one token, all others the response.

    Args:
        rows: `input_ids`, `attention_mask`, `position_ids` and `loss_mask` [B, L], padded on the
            right; positions may be [B, 3, L], with `multi_modal_inputs`.

    Returns:
        The same tensors without positions that are padding in every row, and `response_mask`
        [B, T] instead of `loss_mask`.

    Raises:
        DataError: no row has more than one token.
    """
    width = int(rows.batch["attention_mask"].sum(-1).max())
    if width < 2:
        raise DataError("a batch", got="rows of one token", expected="a question and an answer")
    tensors = {}
    for key in ("input_ids", "attention_mask", "position_ids"):
        tensors[key] = rows.batch[key][..., :width]
    tensors["response_mask"] = rows.batch["loss_mask"][:, 1:width]
    return DataProto.from_dict(tensors=tensors, non_tensors=rows.non_tensor_batch)


class RewardModelTrainer(SupervisedTrainer):
    """Trains reward models on pairs of responses.

    Validation has `loss`, and `accuracy`, the share of pairs in the right order.
    """

    def step(self, rows: DataProto) -> int:
        """Take an optimizer step on pairs of responses. Returns the number of tokens."""
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
        # The engine's loss is the sum of slope x score, whose gradient is that of the pairs' loss.
        batch.batch["score_slope"] = slopes.flatten()
        self.update(batch)
        return int(rows.batch["attention_mask"].sum())

    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        """Sum of the losses and number of correctly ordered pairs, each with the number of pairs."""
        scores = self._scores(pairs_batch(rows))
        losses, _ = bradley_terry(scores)
        num_right = float((scores[:, 0] > scores[:, 1]).sum())
        return {"loss": (float(losses.sum()), len(losses)), "accuracy": (num_right, len(losses))}

    def _scores(self, batch: DataProto) -> torch.Tensor:
        """Scores [pairs, 2] of a batch of pairs, the better response's first."""
        scores = self.learner.predict(batch).batch["rm_scores"].sum(-1)
        is_bad = ~torch.isfinite(scores)
        if is_bad.any():
            raise EngineError(
                "reward model",
                got=f"{int(is_bad.sum())} of {len(scores)} scores that are not finite",
                expected="finite scores",
                fix="Lower optim.lr, or set engine.fsdp_config.model_dtype=float32.",
            )
        return scores.view(-1, 2)


def bradley_terry(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, and the derivative of the mean loss with respect to each score.

    Args:
        scores: [pairs, 2], the better response's first.

    Returns:
        Losses [pairs] and slopes [pairs, 2].
    """
    margins = scores[:, 0] - scores[:, 1]
    # The slope of a pair's loss is the probability of the wrong order according to the model. The
    # slope of the mean loss is that divided by the number of pairs.
    wrong = torch.sigmoid(-margins) / len(margins)
    return -logsigmoid(margins), torch.stack([-wrong, wrong], dim=-1)


def pairs_batch(rows: DataProto) -> DataProto:
    """Convert pairs to the engine's format: two rows for each, the better response first.

    Args:
        rows: `input_ids`, `attention_mask` and `position_ids` [B, 2, L], and `num_prompt_tokens`
            [B]; for a vision-language model positions are [B, 2, 3, L], and there are
            `multi_modal_inputs`.
    """
    batch = rows.batch
    # Without a vision-language model there are none.
    inputs_of_rows = rows.non_tensor_batch.get("multi_modal_inputs", [None] * len(rows))
    sequences = []
    for row, inputs in enumerate(inputs_of_rows):
        num_prompt_tokens = int(batch["num_prompt_tokens"][row])
        # The better response, then the other one.
        for side in range(2):
            is_token = batch["attention_mask"][row, side].bool()
            ids = batch["input_ids"][row, side][is_token].tolist()
            positions = None
            if inputs is not None:
                positions = batch["position_ids"][row, side][:, is_token]
            prompt = ids[:num_prompt_tokens]
            response = ids[num_prompt_tokens:]
            sequences.append(SequenceTokens(prompt, response, positions, inputs or {}))
    return sequences_batch(sequences)
