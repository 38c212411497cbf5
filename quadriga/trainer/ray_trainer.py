# SPDX-License-Identifier: Apache-2.0
"""The reinforcement learning loop: a short sequential program on the driver that calls workers.

    generate ─> rewards ────────┬─> KL in reward -> off-policy correction -> advantages
              ├ old log-probs ──┤                              -> critic -> actor -> publish weights
              ├ reference ──────┤
              ├ teacher ────────┤
              └ values ─────────┘

The passes in the left column read only the responses, so all of them are started before any is
awaited. Models on different pools compute at the same time, models on one pool in this order;
graders run in separate processes (`trainer/responses.py`). With `algorithm.filter_groups`,
responses are generated and graded until the batch is full; only then do the models start.

Each step of the algorithm is one method call. Which ones are needed follows from the estimator and
the configuration (`Needs`), so no branch here names an algorithm, an engine or a backend.

Legend: B rows, T response positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.kl import PENALTY_FIELDS, apply_kl_penalty, get_kl_controller
from quadriga.algorithms.masked import log_prob_mismatch
from quadriga.algorithms.pf_ppo import pf_ppo_rows
from quadriga.algorithms.registry import MEMORY, EstimatorMemory, estimate_advantages, options
from quadriga.algorithms.rollout_correction import correct_rollout
from quadriga.config import Config, learns_from_rewards, writes_checkpoints
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.operations import get_all
from quadriga.rewards import RewardManager
from quadriga.trainer.asynchronous.batches import AsyncBatches
from quadriga.trainer.balance import SequenceCost, order_for_ranks
from quadriga.trainer.group_filter import GroupFilter
from quadriga.trainer.loop import TrainingLoop, TrainingStep
from quadriga.trainer.metrics import (
    check_log_probs,
    data_metrics,
    dead_signals,
    lost_gradients,
    performance_metrics,
    unused_tools,
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
from quadriga.trainer.roles import Needs, configured_estimator
from quadriga.trainer.rollout_cache import RolloutCache
from quadriga.trainer.rollout_pool import RolloutPool, WeightPublisher
from quadriga.trainer.rollout_record import RolloutRecorder, add_update_outputs
from quadriga.trainer.rollout_rows import rollout_numbers, scored_rows, with_turn_rewards
from quadriga.trainer.validate import Validator
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker, TeacherWorker
from quadriga.workers.base import MODEL_OBJECTS, UpdateInputs, model_inputs


@dataclass(frozen=True)
class Workers:
    """Handles of the worker groups, typed as their workers; None for a role that the run lacks.

    `rollout` and `reference` are the actor's group if its processes also have that role. `weights`
    sends the actor's weights to the rollout.
    """

    actor: ActorRolloutRefWorker
    rollout: ActorRolloutRefWorker | RolloutPool
    weights: WeightPublisher
    reference: ActorRolloutRefWorker | None
    critic: CriticWorker | None
    reward_model: RewardModelWorker | None = None
    teacher: TeacherWorker | None = None


class RayPPOTrainer(TrainingLoop):
    """Training loop of PPO, GRPO and related algorithms, for every backend.

    Args:
        config: the resolved configuration.
        tokenizer: decodes the rows that are written for people.
        workers: handles of the worker groups.
        reward: computes the rewards of responses in training and in validation, with graders, a
            reward model, or both.
        train_dataloader: stateful loader whose batches are dictionaries of columns.
        val_dataloader: loader of the validation rows, or None.
        total_training_steps: number of the last step.

    Attributes:
        asynchronous: source of batches that are generated during earlier steps; None if batches
            are generated within their step.
        batch_metrics: metrics of the current batch or mini-batch.
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
        algorithm = config.algorithm
        self.tokenizer = tokenizer
        self.reward = reward
        self.train_dataloader = train_dataloader
        self.actor = workers.actor
        self.reference = workers.reference
        self.critic = workers.critic
        self.teacher = workers.teacher
        self.weights = workers.weights
        self.prompts = PromptStream(
            train_dataloader,
            num_epochs=config.trainer.max_epochs,
            is_saved=writes_checkpoints(config),
        )
        self.kl_controller = get_kl_controller(algorithm.kl_ctrl)
        learners: dict[str, Any] = {"actor": self.actor}
        if self.critic:
            learners["critic"] = self.critic
        resumable: dict[str, Any] = {"loader": self.prompts, "kl_controller": self.kl_controller}
        self.estimator = configured_estimator(config).function
        self.memory = EstimatorMemory()
        if MEMORY in options(self.estimator):
            resumable["estimator"] = self.memory
        super().__init__(config, learners, total_training_steps, resumable)

        if not learns_from_rewards(config):
            # Suppress the warning about equal scores.
            self.warned.add("scores")
        self.needs = Needs.of(config)
        self.inputs = UpdateInputs(config)
        # With one rank, `order_for_ranks` leaves the rows in their order.
        self.num_ranks = 1
        self.cost = SequenceCost()
        if config.trainer.balance_batch:
            self.num_ranks, attention_tokens, head, images = self.actor.ranks_and_costs()
            self.cost = SequenceCost(attention_tokens, head=head, images=images)
        self.recorder = RolloutRecorder(config, tokenizer, self.checkpoints)
        self.validator = Validator(
            config, tokenizer, workers.rollout, reward, val_dataloader, self.recorder
        )
        self.respond: Callable[[DataProto, int], DataProto] = partial(
            generate_responses, workers.rollout, config
        )
        if config.actor_rollout_ref.rollout.skip.enable:
            self.respond = RolloutCache(self.respond, config)
        self.filters_groups = algorithm.filter_groups.enable
        self.batch_metrics: dict[str, Metric | Sequence[Metric]] = {}
        if config.async_training.enable:
            self.asynchronous = AsyncBatches(
                self.weights, self.actor, self.prompts, reward, config, total_training_steps
            )
            self.weights = self.asynchronous
            # Saved before the position in the data, because saving the state of generation may take
            # more prompts.
            self.resumable = {"asynchronous": self.asynchronous, **self.resumable}

    def steps(self) -> Iterator[TrainingStep]:
        """Train step by step, after a validation of the first policy if one is configured."""
        trainer = self.config.trainer
        if self.load_checkpoint():
            # The rollout still has the initial weights.
            self.weights.publish(self.global_steps)
        is_continued = self.global_steps > 0 or self.recovery is not None
        self.recorder.begin(self.global_steps, is_continued=is_continued)
        with self.reporting():
            if trainer.val_only or (trainer.val_before_train and self.global_steps == 0):
                self.tracking.log(self.validate(), self.global_steps)
            if trainer.val_only:
                return
            # For the predicted time: a single validation, after the last step, takes as long as the
            # validation before the first one. Frequent validations are part of the steps' pace.
            self.progress.begin(is_repeated=trainer.test_freq >= self.total_training_steps)
            while not self.is_last_step:
                batch = None
                if self.skips_next_step:
                    self.skip_step(self.rows_to_skip)
                else:
                    batch = self.train_step()
                self.finish_step(batch)
                yield TrainingStep(self, batch)
                # A requested stop ends the run like Ctrl-C, after the step.
                if self.is_stopping:
                    raise KeyboardInterrupt
            with self.timer.phase("save_checkpoint"):
                self.saver.finish()

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one.

        A run with dynamic sampling also ends when the prompts are used up. How many a step takes is
        known only afterwards.
        """
        ends_with_prompts = self.filters_groups and self.asynchronous is None
        return super().is_last_step or (ends_with_prompts and self.prompts.share_taken == 1.0)

    def train_step(self) -> DataProto:
        """Take and measure the next step; its metrics are in `metrics` afterwards.

        Returns:
            The rows of the step with everything that was computed for them.
        """
        with self.measured():
            batch = self.step()
        self.metrics |= data_metrics(batch)
        self.metrics |= performance_metrics(batch, self.timer.seconds, self.metrics)
        # Events since the last step, such as restarts of engines.
        for name, count in self.weights.take_counts().items():
            self.metrics[name] = self.metrics.get(name, 0.0) + count
        warnings = dead_signals(batch, self.settings)
        warnings |= lost_gradients(self.metrics)
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        self.warn_once(warnings | unused_tools(self.metrics, turns))
        return batch

    def step(self) -> DataProto:
        """Generate responses, learn from them and publish the new weights.

        Returns:
            The rows of the step with everything that was computed for them.
        """
        # Several parts only with `async_training.by_mini_batch`.
        parts = []
        metrics_of_parts = []
        for batch in self.batches():
            self.batch_metrics = {}
            parts.append(self.learn(batch))
            metrics_of_parts.append(self.batch_metrics)
        self.metrics |= reduce_metrics(*metrics_of_parts)
        self.publish_weights()
        self.metrics |= check_log_probs(
            self.metrics,
            self.config.actor_rollout_ref.rollout,
            self.global_steps,
            self.global_steps - self.initial_steps,
        )
        return parts[0] if len(parts) == 1 else _join_mini_batches(parts)

    def learn(self, batch: DataProto) -> DataProto:
        """Compute rewards and advantages of the responses, and update the critic and the actor.

        Returns:
            The same batch with everything that was computed for its rows.
        """
        policy = self.config.actor_rollout_ref
        # Reorders the batch in place and returns metrics of the balance between the ranks.
        self.note(order_for_ranks(batch, self.num_ranks, policy.rollout.n, policy.actor, self.cost))

        # All passes that read only the responses.
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

        # From log-probs and rewards to advantages, on the driver.
        self.compare_log_probs(batch)
        self.charge_divergence(batch)
        self.correct_rollout(batch)
        self.compute_advantages(batch)

        # The critic is updated in every step, the actor only after the critic's warm-up.
        learned, places = self.draw_rows(batch)
        if self.critic:
            with self.timer.phase("update_critic"):
                self.record(self.critic.update_critic(self.inputs.select(learned, "critic")))
        if self.global_steps > self.config.trainer.critic_warmup:
            with self.timer.phase("update_actor"):
                inputs = self.inputs.select(learned, "actor")
                # The record has the log-probs of the pass for old log-probs, or else of the update.
                with_log_probs = self.recorder.is_on and not self.needs.old_log_probs
                outputs = self.actor.update_actor(inputs, with_log_probs)
                self.record(outputs)
                add_update_outputs(batch, outputs, places)
        return batch

    def publish_weights(self) -> None:
        """Send the weights of this step to the rollout, unless only the critic was updated."""
        if self.global_steps > self.config.trainer.critic_warmup:
            with self.timer.phase("publish_weights"):
                self.weights.publish(self.global_steps)

    # Responses

    def batches(self) -> Iterator[DataProto]:
        """Yield the responses to learn from in this step: a batch, or several mini-batches.

        They are generated now or, with `async_training`, were generated during earlier steps. Only
        with `async_training.by_mini_batch` are there several batches.
        """
        if self.asynchronous is not None:
            is_last = False
            while not is_last:
                with self.timer.phase("gen"):
                    batch, is_last = self.asynchronous.take(self.global_steps)
                yield batch
        elif self.filters_groups:
            yield self.sample_groups()
        else:
            yield self.generate(self.next_prompts())

    def next_prompts(self, num_before: int = 0) -> DataProto:
        """Take the next batch of prompts and give each a `uid`.

        Args:
            num_before: number of prompts that this step has already taken.
        """
        with self.timer.phase("data"):
            batch = self.prompts.take()
        self.num_rows += len(batch)
        prompts = assign_uids(batch, str(self.global_steps), first=num_before)
        prompts.meta_info["global_steps"] = self.global_steps
        prompts.meta_info["total_training_steps"] = self.total_training_steps
        return prompts

    def generate(self, prompts: DataProto) -> DataProto:
        """Generate `rollout.n` responses to each prompt; rows keep the columns of their prompt."""
        if self.needs.greedy_baseline:
            # ReMax: the baseline of a prompt is the reward of its greedy response.
            with self.timer.phase("gen_max"):
                greedy = DataProto(
                    prompts.batch,
                    prompts.non_tensor_batch,
                    {**prompts.meta_info, "do_sample": False},
                )
                responses = self.respond(greedy, 1)
                scores = grade(self.reward, responses).scores.sum(-1)
                prompts.batch["reward_baselines"] = rollout_means(scores, responses)
        with self.timer.phase("gen"):
            return self.respond(prompts, self.config.actor_rollout_ref.rollout.n)

    def sample_groups(self) -> DataProto:
        """Dynamic sampling: generate and grade until enough groups have unequal rewards."""
        groups = GroupFilter(self.config)
        while not groups.is_full:
            batch = self.generate(self.next_prompts(num_before=groups.num_groups))
            with self.timer.phase("reward"):
                grade(self.reward, batch)
            groups.add(batch)
        batch = groups.batch()
        self.predict_num_steps(batch)
        return batch

    def predict_num_steps(self, batch: DataProto) -> None:
        """Predict the number of steps of a run with dynamic sampling, which ends with the prompts."""
        share_taken = self.prompts.share_taken
        if share_taken:
            # Assumes that later steps take as many batches of prompts as the steps so far.
            num_steps = min(self.total_training_steps, self.global_steps / share_taken)
            batch.meta_info["total_training_steps"] = num_steps
            self.progress.total = round(num_steps)

    # From responses to advantages

    @contextmanager
    def rewards_and(self, batch: DataProto) -> Iterator[Callable[..., None]]:
        """Context manager: compute rewards and, at the same time, the passes that the block starts.

        Yields `begin`; the block starts a pass with `begin(method, *args)`. On exit the rewards and
        the results of all passes are columns of the batch.

        Consumes: the responses. Waits for: graders and a reward model, then for all passes together.
        Unblocked by: the last of them, or the first that fails; its error is raised, and the
        graders are stopped. Each column of results is in memory twice while it is joined.
        """
        futures = []

        def begin(method: Callable[..., Any], *args: Any) -> None:
            """Start a pass: call a method that returns a future of columns."""
            futures.append(method(*args))

        with self.timer.phase("prepare"), ExitStack() as stack:
            self.record(batch)
            rewards = None
            # With dynamic sampling, the responses have been graded already, to choose groups.
            if "token_level_scores" not in batch.batch.keys():
                with self.timer.phase("reward"):
                    rewards = BatchRewards(self.reward, batch)
                # If a pass fails, nobody waits for the graders.
                stack.callback(rewards.cancel)
            # The block starts its passes.
            yield begin
            if rewards is not None:
                with self.timer.phase("reward"):
                    rewards.join(batch)
                self.record(batch)
            for result in get_all(futures):
                self.record(result)
                batch.union(result)

    def compare_log_probs(self, batch: DataProto) -> None:
        """Add metrics of the policy's entropy, and of the mismatch with the rollout's log-probs."""
        if not self.needs.old_log_probs:
            return
        mask = batch.batch["response_mask"]
        entropy = batch.batch["entropys"]
        mean_entropy = (entropy * mask).sum() / mask.sum().clamp(min=1)
        self.note({"actor/entropy": float(mean_entropy)})
        if self.asynchronous is not None:
            # Only tokens drawn from the current weights can be compared with them. If updates have
            # changed the weights since they were published (`is_current` is False), none can.
            mask = mask * (batch.batch["token_staleness"] == 0) * self.asynchronous.is_current
        if mask.any():
            mismatch = log_prob_mismatch(
                batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], mask
            )
            self.note({f"rollout/{name}": value for name, value in mismatch.items()})

    def charge_divergence(self, batch: DataProto) -> None:
        """Add `token_level_rewards` [B, T]: the scores, minus a KL penalty if `use_kl_in_reward`.

        Must be called before `correct_rollout` masks tokens, because the reward of a response
        counts all of its tokens.
        """
        algorithm = self.config.algorithm
        with self.timer.phase("adv"):
            rewards = batch.batch["token_level_scores"]
            if "turn_rewards" in batch.non_tensor_batch:
                rewards = with_turn_rewards(rewards, batch)
            if algorithm.use_kl_in_reward:
                fields = {name: batch.batch[name] for name in PENALTY_FIELDS}
                fields["token_level_scores"] = rewards
                # Also adapts the controller's coefficient for the next batch.
                rewards, metrics = apply_kl_penalty(
                    **fields, kl_ctrl=self.kl_controller, kind=algorithm.kl_penalty
                )
                self.note(metrics)
            batch.batch["token_level_rewards"] = rewards

    def correct_rollout(self, batch: DataProto) -> dict[str, float]:
        """Off-policy correction: add `rollout_is_weights`, and mask rejected tokens, both [B, T].

        Returns:
            The metrics of the correction, which are also added to `batch_metrics`.
        """
        correction = self.config.algorithm.rollout_correction
        if not correction.needs_old_log_probs:
            return {}
        changed_columns, metrics = correct_rollout(dict(batch.batch.items()), correction)
        for name, column in changed_columns.items():
            batch.batch[name] = column
        self.note(metrics)
        return metrics

    def compute_advantages(self, batch: DataProto) -> None:
        """Add `advantages` and `returns` [B, T]; both are 0 if the run does not use rewards."""
        with self.timer.phase("adv"):
            if learns_from_rewards(self.config):
                advantages, returns = self._estimate_advantages(batch)
            else:
                # Distillation alone: the loss has no term with advantages.
                advantages = torch.zeros_like(batch.batch["token_level_rewards"])
                returns = advantages.clone()
            batch.batch["advantages"] = advantages
            batch.batch["returns"] = returns

    def _estimate_advantages(self, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns, [B, T] each; rows without a score are masked and get 0."""
        is_scored = scored_rows(batch)
        scored = batch
        if not is_scored.all():
            # Rows without a score must not be part of a baseline either, so the estimator does not
            # get them.
            batch.batch["response_mask"] = batch.batch["response_mask"] * is_scored[:, None]
            scored = batch.select_idxs(is_scored)
        fields = {**dict(scored.batch.items()), **scored.non_tensor_batch}
        # Estimators read this column as `data_source`, whatever its name in the data is.
        source = self.config.data.reward_fn_key
        if source in fields:
            fields["data_source"] = fields[source]
        advantages, returns = estimate_advantages(self.estimator, fields, self.memory.values)
        if scored is not batch:
            advantages = _scattered(advantages, is_scored)
            returns = _scattered(returns, is_scored)
        return advantages, returns

    def draw_rows(self, batch: DataProto) -> tuple[DataProto, torch.Tensor | None]:
        """With `use_pf_ppo`, draw the rollouts to learn from by their scores.

        Returns:
            The rows to learn from, and their places in the batch. Without `use_pf_ppo` the batch
            itself, and None.
        """
        algorithm = self.config.algorithm
        if not algorithm.use_pf_ppo:
            return batch, None
        # The sample must not depend on how the rows are arranged for the ranks.
        order = batch.batch["row_index"].argsort()
        ordered = batch.select_idxs(order)
        scores = rollout_means(ordered.batch["token_level_scores"].sum(-1), ordered)
        seed = self.config.trainer.seed + self.global_steps
        drawn_rollouts = pf_ppo_rows(scores, **dict(algorithm.pf_ppo), seed=seed)

        # A rollout that is drawn twice counts as two.
        numbers = np.array(rollout_numbers(ordered))
        rows_of_draws = [np.flatnonzero(numbers == rollout) for rollout in drawn_rollouts.tolist()]
        rows = np.concatenate(rows_of_draws)

        # The sample is a batch of its own, whose rows and rollouts are numbered anew.
        sample = ordered.select_idxs(rows)
        sample.batch["row_index"] = torch.arange(len(sample))
        if "rollout_index" in sample.batch.keys():
            sizes = torch.tensor([len(rows_of_draw) for rows_of_draw in rows_of_draws])
            sample.batch["rollout_index"] = torch.arange(len(sizes)).repeat_interleave(sizes)
        # `rows` are places in `ordered`; `order` maps them to places in the batch.
        return sample, order[rows]

    # After the update

    def finish_step(self, batch: DataProto | None) -> None:
        """Write samples, validate, report, and start a checkpoint, each where it is due.

        Args:
            batch: rows of the step; None if it was skipped.
        """
        trainer = self.config.trainer
        # A checkpoint of an earlier step may have been written meanwhile.
        self.saver.poll()
        if batch is not None:
            facts = {"total_training_steps": self.total_training_steps, "metrics": self.metrics}
            self.recorder.add_step(self.global_steps, batch, facts)
            if trainer.rollout_data_dir:
                self.write_rollouts(batch, trainer.rollout_data_dir)
        if self.is_due(trainer.test_freq):
            self.metrics |= self.validate()
        self.metrics["training/global_step"] = self.global_steps
        self.metrics["training/epoch"] = self.prompts.epoch
        self.log_step()
        # Before the checkpoint, which has the states of the sampler and the data set.
        if batch is not None:
            self.hand_back(batch)
        self.save_where_due()

    def write_rollouts(self, batch: DataProto, directory: str) -> None:
        """Write the graded responses of the step, in the order of the data."""
        rows = sample_rows(batch, self.tokenizer, self.config.data)
        # Rows that were not ordered for the ranks have no index.
        if "row_index" in batch.batch.keys():
            rows = [rows[row] for row in batch.batch["row_index"].argsort().tolist()]
        write_samples(directory, self.global_steps, rows)

    def hand_back(self, batch: DataProto) -> None:
        """Pass the batch to a sampler with `update` and to a data set with `on_batch_end`.

        Each value that graders return besides the score becomes a column, unless there is already a
        column of that name.
        """
        loader = self.train_dataloader
        if not hasattr(loader.sampler, "update") and not hasattr(loader.dataset, "on_batch_end"):
            return
        # A column for each name that graders have returned; None in rows without a value.
        columns = dict(batch.non_tensor_batch)
        extras = columns.get("reward_extra", ())
        grader_names = set().union(*extras)
        for name in grader_names - columns.keys():
            columns[name] = object_array([extra.get(name) for extra in extras])
        batch = DataProto(batch.batch, columns, batch.meta_info)
        with waiting("the sampler and the data set to take note of a batch (update, on_batch_end)"):
            if hasattr(loader.sampler, "update"):
                loader.sampler.update(batch=batch)
            if hasattr(loader.dataset, "on_batch_end"):
                loader.dataset.on_batch_end(batch=batch)

    def validate(self) -> dict[str, float]:
        """Validate the current policy and log samples. Returns the metrics."""
        with self.timer.phase("testing"):
            metrics, rows = self.validator.run(self.global_steps)
        self.tracking.log_samples(rows, self.global_steps)
        return metrics

    def rows_to_skip(self, num_rows: int) -> list[dict[str, Any]]:
        """Take the prompts of a skipped step from the data.

        Args:
            num_rows: least number of prompts to take. It is not used with `async_training`, where
                the step takes the batches that it would have learned from.

        Returns:
            One row per prompt, as it is written to the quarantine.
        """
        if self.asynchronous is not None:
            batches = list(self.batches())
        else:
            batches = [self.next_prompts()]
            while self.num_rows < num_rows:
                batches.append(self.next_prompts(num_before=self.num_rows))
        self.publish_weights()
        # A prompt appears once even if it has several responses.
        rows_by_uid = {}
        for batch in batches:
            for row in prompt_rows(batch, self.tokenizer):
                rows_by_uid[row["uid"]] = row
        return list(rows_by_uid.values())

    def record(self, result: DataProto) -> None:
        """Move metrics from the output of a worker group to `batch_metrics`."""
        self.batch_metrics |= result.meta_info.pop("metrics", {})

    def note(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to `batch_metrics`; a step reports their means over its mini-batches."""
        for name, value in numbers.items():
            self.batch_metrics[name] = Metric(value)

    def close(self) -> None:
        """Stop asynchronous generation, the rollout recorder, the profiler and the graders."""
        if self.asynchronous is not None:
            self.asynchronous.stop()
        self.recorder.finish()
        super().close()
        self.reward.close()
        # Validation may have another reward manager.
        if self.validator.reward is not self.reward:
            self.validator.reward.close()


def _join_mini_batches(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate the mini-batches of a step; `row_index` numbers the rows consecutively."""
    num_before = 0
    for part in parts:
        part.batch["row_index"] = part.batch["row_index"] + num_before
        num_before += len(part)
        # `rollout_index` counts the rollouts of one mini-batch, and nothing reads it after the
        # update.
        part.batch.pop("rollout_index", None)
    return DataProto.concat(parts)


def _scattered(values: torch.Tensor, is_chosen: torch.Tensor) -> torch.Tensor:
    """Values [b, T] of the chosen rows as [B, T], 0 in the other rows."""
    scattered = values.new_zeros(len(is_chosen), values.shape[1])
    scattered[is_chosen] = values
    return scattered


def rollout_means(values: torch.Tensor, rows: DataProto) -> torch.Tensor:
    """Mean of values [B] over the rows of each rollout, [rollouts]."""
    numbers = torch.tensor(rollout_numbers(rows))
    groups = Groups.of(numbers, values)
    # The means are those of each row's rollout, [B], so one row of each rollout is enough.
    _, first_rows = np.unique(numbers.numpy(), return_index=True)
    return groups.mean(values)[torch.from_numpy(first_rows)]
