# SPDX-License-Identifier: Apache-2.0
"""Training of reward models: of two answers to a prompt the better one is to get the higher score.

Bradley, Terry, 1952; arXiv:2203.02155, equation 1. The probability that the first of two answers is the better one is
sigmoid(score of the first - score of the second); the loss is the negative log of it, averaged over pairs.

    scores, without gradients  ->  on the driver: loss of each pair, and its slope by each score  ->  slope x score
                                                                                                       with gradients

The second pass has the gradient of the loss, exactly, and pairs need not stay together on the way: an answer may be in
another micro-batch, or another process, than the one that it is compared with. The price is the first pass.
"""

import torch
from torch.nn.functional import logsigmoid

from quadriga.errors import EngineError
from quadriga.protocol import DataProto
from quadriga.trainer.sft import SupervisedTrainer
from quadriga.workers.reward_model import SequenceTokens, sequences_batch
from quadriga.workers.sft import SCORE_SLOPE


class RewardModelTrainer(SupervisedTrainer):
    """Learns the order of pairs. Arguments: see `SupervisedTrainer`."""

    def step(self, rows: DataProto) -> int:
        """See `SupervisedTrainer.step`."""
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
        batch.batch[SCORE_SLOPE] = slopes.flatten()
        self.update(batch)
        return int(rows.batch["attention_mask"].sum())

    def judge(self, rows: DataProto) -> dict[str, tuple[float, float]]:
        """See `SupervisedTrainer.judge`: `loss`, and `accuracy`, the share of pairs in the right order."""
        scores = self._scores(pairs_batch(rows))
        losses, _ = bradley_terry(scores)
        num_right = float((scores[:, 0] > scores[:, 1]).sum())
        return {"loss": (float(losses.sum()), len(losses)), "accuracy": (num_right, len(losses))}

    def _scores(self, batch: DataProto) -> torch.Tensor:
        """[pairs, 2], the better answer's first."""
        scores = self.learner.predict(batch).batch["rm_scores"].sum(-1)
        if not torch.isfinite(scores).all():
            raise EngineError(
                "reward model",
                got=f"{int((~torch.isfinite(scores)).sum())} of {len(scores)} scores that are not finite",
                expected="finite scores",
                fix="Lower optim.lr, or set engine.fsdp_config.model_dtype=float32.",
            )
        return scores.view(-1, 2)


def bradley_terry(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, and the slopes of their mean.

    Args:
        scores: [pairs, 2], the better answer's first.

    Returns:
        losses [pairs]; slopes [pairs, 2], the derivative of the mean loss by each score.
    """
    margins = scores[:, 0] - scores[:, 1]
    wrong = torch.sigmoid(-margins) / len(margins)
    return -logsigmoid(margins), torch.stack([-wrong, wrong], dim=-1)


def pairs_batch(rows: DataProto) -> DataProto:
    """Pairs as the engine reads them: two rows each, the better answer first.

    Args:
        rows: `input_ids` and `attention_mask` [B, 2, L], and `num_prompt_tokens` [B].
    """
    sequences = []
    columns = (rows.batch.get(key) for key in ("input_ids", "attention_mask", "num_prompt_tokens"))
    for tokens, valid, num_prompt in zip(*columns, strict=True):
        for row, mask in zip(tokens, valid.bool(), strict=True):
            ids, start = row[mask].tolist(), int(num_prompt)
            sequences.append(SequenceTokens(ids[:start], ids[start:]))
    return sequences_batch(sequences)
