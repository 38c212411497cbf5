# SPDX-License-Identifier: Apache-2.0
"""The training loop: one short sequential program on the driver, over workers that may be anywhere.

    generate ─> rewards ────────┬─> KL in reward -> off-policy correction -> advantages
              ├ old log-probs ──┤                                            -> critic -> actor -> publish weights
              ├ reference ──────┤
              ├ teacher ────────┤
              └ values ─────────┘

What stands below each other reads the responses alone: all is begun, then joined. On pools of their own the models
compute at the same time, on one pool in this order; graders have processes of their own (`trainer/responses.py`). With
`algorithm.filter_groups` responses are generated and graded until the batch is full, before the models begin.

Each step of the algorithm is one call. What a step needs follows from the estimator and the configuration (`Needs`), so
that no branch here names an algorithm, an engine or a backend.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quadriga.algorithms.kl import PENALTY_FIELDS, apply_kl_penalty, get_kl_controller
from quadriga.algorithms.masked import log_prob_mismatch
from quadriga.algorithms.pf_ppo import pf_ppo_rows
from quadriga.algorithms.registry import choose_estimator, estimate_advantages
from quadriga.algorithms.rollout_correction import correct_rollout
from quadriga.config import Config, learns_from_rewards
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.protocol.operations import get_all
from quadriga.rewards import RewardManager
from quadriga.trainer.asynchronous.batches import AsyncBatches
from quadriga.trainer.balance import SequenceCost, order_for_ranks
from quadriga.trainer.group_filter import GroupFilter
from quadriga.trainer.loop import Step, TrainingLoop
from quadriga.trainer.metrics import (
    check_log_probs,
    data_metrics,
    dead_signals,
    lost_gradients,
    performance_metrics,
)
from quadriga.trainer.prompts import PromptStream, assign_uids
from quadriga.trainer.responses import (
    BatchRewards,
    generate_responses,
    grade,
    prompt_rows,
    sample_rows,
    write_samples,
)
from quadriga.trainer.roles import Needs
from quadriga.trainer.rollout_cache import RolloutCache
from quadriga.trainer.rollout_pool import RolloutPool, WeightPublisher
from quadriga.trainer.validate import Validator
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker, TeacherWorker
from quadriga.workers.base import MODEL_OBJECTS, UpdateInputs, model_inputs


@dataclass(frozen=True)
class Workers:
    """Handles of the worker groups, typed as their workers, and the way from the actor's weights to the rollout.

    Those of the rollout and of the reference are the actor's own where they are inside.
    """

    actor: ActorRolloutRefWorker
    rollout: ActorRolloutRefWorker | RolloutPool
    weights: WeightPublisher
    reference: ActorRolloutRefWorker | None
    critic: CriticWorker | None
    reward_model: RewardModelWorker | None = None
    teacher: TeacherWorker | None = None


class RayPPOTrainer(TrainingLoop):
    """PPO, GRPO and their relatives, on either backend.

    Args:
        reward: turns responses into rewards, in training and in validation; by graders, a reward model, or both.
        train_dataloader: stateful; its batches are dictionaries of columns.
        val_dataloader: the same, or None.

    Attributes:
        asynchronous: where batches come from that are generated meanwhile; None: they are generated in their step.
        batch_metrics: those of the batch that is learned from, or of its mini-batch.
    """

    asynchronous: AsyncBatches | None = None

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        workers: Workers,
        reward: RewardManager,
        train_dataloader: Any,
        val_dataloader: Any,
        total_training_steps: int,
    ) -> None:
        self.tokenizer, self.reward = tokenizer, reward
        self.actor, self.reference, self.critic = workers.actor, workers.reference, workers.critic
        self.train_dataloader, self.weights, self.teacher = (
            train_dataloader,
            workers.weights,
            workers.teacher,
        )
        passes = config.trainer.max_epochs
        self.prompts = PromptStream(
            train_dataloader, num_epochs=passes, is_saved=config.trainer.save_freq > 0
        )
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        learners = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        resumable = {"loader": self.prompts, "kl_controller": self.kl_controller}
        super().__init__(config, learners, total_training_steps, resumable)
        if not learns_from_rewards(config):
            self.warned.add("scores")
        self.needs = Needs.of(config)
        self.inputs = UpdateInputs(config)
        algorithm = config.algorithm
        shared = {**dict(algorithm), "config": algorithm}
        self.estimator = choose_estimator(
            algorithm.adv_estimator, algorithm.adv_options, shared
        ).function
        self.num_ranks, self.cost = 1, SequenceCost()
        if config.trainer.balance_batch:
            self.num_ranks, *costs = self.actor.ranks_and_costs()
            self.cost = SequenceCost(*costs)
        self.validator = Validator(config, tokenizer, workers.rollout, reward, val_dataloader)
        self.respond: Callable[[DataProto, int], DataProto] = partial(
            generate_responses, workers.rollout, config
        )
        if config.actor_rollout_ref.rollout.skip.enable:
            self.respond = RolloutCache(self.respond, config)
        self.filters_groups = algorithm.filter_groups.enable
        self.batch_metrics: dict[str, Metric | Sequence[Metric]] = {}
        if config.async_training.enable:
            given = (self.weights, self.actor, self.prompts, reward, config, total_training_steps)
            self.weights = self.asynchronous = AsyncBatches(*given)
            # Before the place in the data: what is under way comes to its end first.
            self.resumable = {"asynchronous": self.asynchronous, **self.resumable}

    def steps(self) -> Iterator[Step]:
        """As `TrainingLoop.steps`; before the first step the policy may be validated."""
        if self.load_checkpoint():
            self.weights.publish(self.global_steps)
        with self.reporting():
            if self.config.trainer.val_only or (
                self.config.trainer.val_before_train and self.global_steps == 0
            ):
                self.tracking.log(self.validate(), self.global_steps)
            if self.config.trainer.val_only:
                return
            self.progress.begin()
            while not self.is_last_step:
                batch = None
                if self.skips_next_step:
                    self.skip_step(self.rows_to_skip)
                else:
                    batch = self.train_step()
                self.finish_step(batch)
                yield Step(self, batch)
                if self.is_stopping:
                    raise KeyboardInterrupt
            self.saver.finish()

    @property
    def is_last_step(self) -> bool:
        """As `TrainingLoop.is_last_step`; of dynamic sampling it is known once the step has its prompts."""
        ends_with_prompts = self.filters_groups and self.asynchronous is None
        return super().is_last_step or (ends_with_prompts and self.prompts.share_taken == 1.0)

    def train_step(self) -> DataProto:
        """The next step, measured: afterwards `metrics` holds its numbers. Returns the batch."""
        with self.measured():
            batch = self.step()
        self.metrics |= data_metrics(batch) | performance_metrics(
            batch, self.timer.seconds, self.metrics
        )
        for name, count in self.weights.take_counts().items():
            self.metrics[name] = self.metrics.get(name, 0.0) + count
        self.warn_once(dead_signals(batch) | lost_gradients(self.metrics))
        return batch

    def step(self) -> DataProto:
        """From prompts over responses to new weights. Returns the batch with all that was computed."""
        parts, measured = [], []
        for batch in self.batches():
            self.batch_metrics = {}
            parts.append(self.learn(batch))
            measured.append(self.batch_metrics)
        self.metrics |= reduce_metrics(*measured)
        self.publish_weights()
        self.metrics |= check_log_probs(
            self.metrics, self.config.actor_rollout_ref.rollout, self.global_steps
        )
        return parts[0] if len(parts) == 1 else joined(parts)

    def rows_to_skip(self, num_rows: int) -> list[dict[str, Any]]:
        """The prompts of a step that is skipped, as they are written: at least `num_rows`.

        Where generation is beside training, they have their responses already.
        """
        batches = [] if self.asynchronous is None else list(self.batches())
        while self.asynchronous is None and (not batches or self.num_rows < num_rows):
            batches.append(self.next_prompts(num_before=self.num_rows))
        self.publish_weights()
        # A prompt may have several responses.
        prompts = [row for batch in batches for row in prompt_rows(batch, self.tokenizer)]
        return list({row["uid"]: row for row in prompts}.values())

    def publish_weights(self) -> None:
        """Give the rollout the weights of this step, where the policy learns."""
        if self.global_steps > self.config.trainer.critic_warmup:
            with self.timer.phase("publish_weights"):
                self.weights.publish(self.global_steps)

    def learn(self, batch: DataProto) -> DataProto:
        """From responses to an update of the models. Returns the batch with all that was computed."""
        policy = self.config.actor_rollout_ref
        self.note(order_for_ranks(batch, self.num_ranks, policy.rollout.n, policy.actor, self.cost))
        with self.rewards_and(batch) as begin:
            inputs = model_inputs(batch)
            if self.needs.old_log_probs:
                begin(
                    self.actor.compute_log_prob,
                    model_inputs(batch, with_routes=True),
                    self.needs.sum_pi_squared,
                )
            if self.reference:
                begin(self.reference.compute_ref_log_prob, inputs)
            if self.teacher:
                objects = (*MODEL_OBJECTS, self.config.data.reward_fn_key)
                begin(self.teacher.compute_teacher_log_prob, model_inputs(batch, objects))
            if self.critic:
                begin(self.critic.compute_values, inputs)
        self.compare_log_probs(batch)
        self.charge_divergence(batch)
        self.correct_rollout(batch)
        self.compute_advantages(batch)
        learned = self.draw_rows(batch)
        if self.critic:
            with self.timer.phase("update_critic"):
                self.record(self.critic.update_critic(self.inputs.select(learned, "critic")))
        if self.global_steps > self.config.trainer.critic_warmup:
            with self.timer.phase("update_actor"):
                self.record(self.actor.update_actor(self.inputs.select(learned, "actor")))
        return batch

    def finish_step(self, batch: DataProto | None) -> None:
        """Write samples, validate, report, and begin to save; a skipped step has no batch."""
        trainer = self.config.trainer
        self.saver.poll()
        if trainer.rollout_data_dir and batch is not None:
            rows = sample_rows(batch, self.tokenizer, self.config.data.reward_fn_key)
            before = batch.batch["row_index"].argsort().tolist()
            write_samples(
                trainer.rollout_data_dir, self.global_steps, [rows[row] for row in before]
            )
        if self.is_due(trainer.test_freq):
            self.metrics |= self.validate()
        self.metrics |= {
            "training/global_step": self.global_steps,
            "training/epoch": self.prompts.epoch,
        }
        self.log_step()
        if batch is not None:
            self.hand_back(batch)
        self.save_where_due()

    def hand_back(self, batch: DataProto) -> None:
        """Show the batch to a sampler and a data set that learn from batches."""
        with waiting("the sampler and the data set to take note of a batch (update, on_batch_end)"):
            if hasattr(self.train_dataloader.sampler, "update"):
                self.train_dataloader.sampler.update(batch=batch)
            if hasattr(self.train_dataloader.dataset, "on_batch_end"):
                self.train_dataloader.dataset.on_batch_end(batch=batch)

    def batches(self) -> Iterator[DataProto]:
        """Responses to learn from: generated here and now, or meanwhile, with `async_training`; with its
        `by_mini_batch` one mini-batch after another."""
        if self.asynchronous is None:
            yield (
                self.sample_groups() if self.filters_groups else self.generate(self.next_prompts())
            )
            return
        is_last = False
        while not is_last:
            with self.timer.phase("gen"):
                batch, is_last = self.asynchronous.take(self.global_steps)
            yield batch

    def next_prompts(self, num_before: int = 0) -> DataProto:
        """The next batch of prompts, of which this step has taken `num_before` already; a `uid` each."""
        with self.timer.phase("data"):
            taken = self.prompts.take()
        self.num_rows += len(taken)
        prompts = assign_uids(taken, str(self.global_steps), first=num_before)
        prompts.meta_info |= {
            "global_steps": self.global_steps,
            "total_training_steps": self.total_training_steps,
        }
        return prompts

    def generate(self, prompts: DataProto) -> DataProto:
        """`rollout.n` responses to each prompt, beside all that is known of the prompt."""
        if self.needs.greedy_baseline:
            with self.timer.phase("gen_max"):
                greedy = DataProto(
                    prompts.batch,
                    prompts.non_tensor_batch,
                    {**prompts.meta_info, "do_sample": False},
                )
                baselines = grade(self.reward, self.respond(greedy, 1)).scores.sum(-1)
                prompts.batch["reward_baselines"] = baselines
        with self.timer.phase("gen"):
            return self.respond(prompts, self.config.actor_rollout_ref.rollout.n)

    def sample_groups(self) -> DataProto:
        """Dynamic sampling: responses to one batch of prompts after another, until enough groups differ in rewards."""
        groups = GroupFilter(self.config)
        while not groups.is_full:
            batch = self.generate(self.next_prompts(num_before=groups.num_groups))
            with self.timer.phase("reward"):
                grade(self.reward, batch)
            groups.add(batch)
        batch = groups.batch()
        if share := self.prompts.share_taken:
            # As many steps as there will be if each takes as many batches as those before.
            steps = batch.meta_info["total_training_steps"] = min(
                self.total_training_steps, self.global_steps / share
            )
            self.progress.total = round(steps)
        return batch

    @contextmanager
    def rewards_and(self, batch: DataProto) -> Iterator[Callable[..., None]]:
        """Rewards and what is begun in the block, by `begin(method, *args)`; after it the batch has all of it.

        Consumes: the responses. Waits for: graders, a reward model, then the models of all pools at once. Unblocked by:
        the last of them, or the first that fails, whose error is raised; graders are stopped then. Each column of
        results is in memory twice while it is joined.
        """
        futures: list[DataProtoFuture] = []
        with self.timer.phase("prepare"), ExitStack() as stack:
            self.record(batch)
            rewards = None
            # Else groups were chosen by their rewards.
            if not self.filters_groups:
                with self.timer.phase("reward"):
                    rewards = BatchRewards(self.reward, batch)
                stack.callback(rewards.cancel)
            yield lambda method, *args: futures.append(method(*args))
            if rewards is not None:
                with self.timer.phase("reward"):
                    rewards.join(batch)
                self.record(batch)
            for result in get_all(futures):
                self.record(result)
                batch.union(result)

    def compare_log_probs(self, batch: DataProto) -> None:
        """Entropy of the policy that the update starts from, and how far the rollout's log-probs are from its own."""
        if not self.needs.old_log_probs:
            return
        mask, entropy = batch.batch["response_mask"], batch.batch.pop("entropys")
        self.note({"actor/entropy": float((entropy * mask).sum() / mask.sum().clamp(min=1))})
        if self.asynchronous is not None:  # others are of other weights
            mask = mask * (batch.batch["token_staleness"] == 0) * self.asynchronous.is_current
        if mask.any():
            mismatch = log_prob_mismatch(
                batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], mask
            )
            self.note({f"rollout/{name}": value for name, value in mismatch.items()})

    def charge_divergence(self, batch: DataProto) -> None:
        """`token_level_rewards` [B, T]: the scores, less a KL penalty with `use_kl_in_reward`.

        Before rejection, which changes the mask: what a response did counts in its reward, whatever is learned from it.
        """
        with self.timer.phase("adv"):
            columns = batch.batch
            columns["token_level_rewards"] = columns["token_level_scores"]
            if self.config.algorithm.use_kl_in_reward:
                own = {"kl_ctrl": self.kl_controller, "kind": self.config.algorithm.kl_penalty}
                read = {name: columns[name] for name in PENALTY_FIELDS}
                columns["token_level_rewards"], kl_metrics = apply_kl_penalty(**read, **own)
                self.note(kl_metrics)

    def correct_rollout(self, batch: DataProto) -> None:
        """Off-policy correction: `rollout_is_weights` and `response_mask` [B, T]."""
        correction = self.config.algorithm.rollout_correction
        if correction.needs_old_log_probs:
            changed, metrics = correct_rollout(dict(batch.batch.items()), correction)
            for name, column in changed.items():
                batch.batch[name] = column
            self.note(metrics)

    def compute_advantages(self, batch: DataProto) -> None:
        """`advantages` and `returns` [B, T], here on the driver; 0 where no reward is learned from."""
        with self.timer.phase("adv"):
            if not learns_from_rewards(self.config):
                nothing = torch.zeros_like(batch.batch["token_level_rewards"])
                batch.batch["advantages"], batch.batch["returns"] = nothing, nothing.clone()
                return
            fields = {**dict(batch.batch.items()), **batch.non_tensor_batch}
            batch.batch["advantages"], batch.batch["returns"] = estimate_advantages(
                self.estimator, fields
            )

    def draw_rows(self, batch: DataProto) -> DataProto:
        """The rows to learn from: all, or with `use_pf_ppo` as many drawn by their scores, whatever their order."""
        algorithm = self.config.algorithm
        if not algorithm.use_pf_ppo:
            return batch
        order = batch.batch["row_index"].argsort()
        scores = batch.batch["token_level_scores"].sum(-1)[order]
        rows = pf_ppo_rows(
            scores, **dict(algorithm.pf_ppo), seed=self.config.trainer.seed + self.global_steps
        )
        drawn = batch.select_idxs(order[rows])
        drawn.batch["row_index"] = torch.arange(len(drawn))
        return drawn

    def validate(self) -> dict[str, float]:
        """Metrics of the responses to all validation prompts; samples go to trackers, and to files if configured."""
        metrics, rows = self.validator.run(self.global_steps)
        self.tracking.log_samples(rows, self.global_steps)
        return metrics

    def record(self, result: DataProto) -> None:
        """Take the metrics out of what a worker group returned."""
        self.batch_metrics |= result.meta_info.pop("metrics", {})

    def note(self, numbers: Mapping[str, float]) -> None:
        """Take metrics that were computed here; a step's are the means of its mini-batches."""
        self.batch_metrics |= {name: Metric(value) for name, value in numbers.items()}

    def close(self) -> None:
        """Stop the graders too."""
        if self.asynchronous is not None:
            self.asynchronous.stop()
        super().close()
        self.reward.close()
        if self.validator.reward is not self.reward:
            self.validator.reward.close()


def joined(parts: Sequence[DataProto]) -> DataProto:
    """The batch of a step whose mini-batches were learned from one by one; `row_index` goes on from part to part."""
    num_before = 0
    for part in parts:
        part.batch["row_index"] = part.batch["row_index"] + num_before
        num_before += len(part)
    return DataProto.concat(parts)
