# SPDX-License-Identifier: Apache-2.0
"""A training loop of a user of verl: a subclass of its trainer that writes `fit` out, call by call.

Names, arguments and order are those of verl's documents, from which users start; nothing here is adapted to this
package. The tests of `test_written_loop.py` and of `tests/e2e/ray` compare its numbers with those of `fit`.
"""

import uuid
from copy import deepcopy
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from tqdm import tqdm
from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.ray_trainer import (
    RayPPOTrainer,
    Role,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.reward import compute_reward
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking


class WrittenOut(RayPPOTrainer):
    """`fit` as a user writes it; `history` keeps the metrics of each step for the tests."""

    def fit(self) -> None:
        logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.history: list[dict[str, float]] = []
        self.global_steps = 0
        self._load_checkpoint()

        if self.val_reward_fn is not None and self.config.trainer.get("val_before_train", True):
            val_metrics = self._validate()
            assert val_metrics, f"{val_metrics=}"
            logger.log(data=val_metrics, step=self.global_steps)
            if self.config.trainer.get("val_only", False):
                return
        assert not self.config.actor_rollout_ref.rollout.get("skip_rollout", False)

        progress_bar = tqdm(
            total=self.total_training_steps,
            initial=self.global_steps,
            desc="Training",
            disable=True,
        )
        self.global_steps += 1
        self.last_val_metrics = None
        self.max_steps_duration = 0
        self.prev_step_profile = False
        self.curr_step_profile = self.is_profiled(self.global_steps)

        for epoch in range(self.config.trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                is_last_step = self.take_step(epoch, batch_dict, logger)
                progress_bar.update(1)
                self.global_steps += 1
                if (
                    hasattr(self.config.actor_rollout_ref.actor, "profiler")
                    and self.config.actor_rollout_ref.actor.profiler.tool == "torch_memory"
                ):
                    self.actor_rollout_wg.dump_memory_snapshot(
                        tag=f"post_update_step{self.global_steps}",
                        sub_dir=f"step{self.global_steps}",
                    )
                if is_last_step:
                    progress_bar.close()
                    return
                if hasattr(self.train_dataset, "on_batch_end"):
                    self.train_dataset.on_batch_end(batch=self.batch)

    def is_profiled(self, step: int) -> bool:
        steps = self.config.global_profiler.steps
        return step in steps if steps is not None else False

    def take_step(self, epoch: int, batch_dict: dict[str, Any], logger: Tracking) -> bool:
        metrics: dict[str, Any] = {}
        timing_raw: dict[str, float] = {}
        with marked_timer("start_profile", timing_raw):
            self._start_profiling(
                not self.prev_step_profile and self.curr_step_profile
                if self.config.global_profiler.profile_continuous_steps
                else self.curr_step_profile
            )
        batch: DataProto = DataProto.from_single_dict(batch_dict)
        batch.non_tensor_batch["uid"] = np.array(
            [str(uuid.uuid4()) for _ in range(len(batch.batch))], dtype=object
        )
        gen_batch = self._get_gen_batch(batch)
        gen_batch.meta_info["global_steps"] = self.global_steps
        gen_batch_output = gen_batch.repeat(
            repeat_times=self.config.actor_rollout_ref.rollout.n, interleave=True
        )
        is_last_step = self.global_steps >= self.total_training_steps
        with marked_timer("step", timing_raw):
            with marked_timer("gen", timing_raw, color="red"):
                if not self.async_rollout_mode:
                    gen_batch_output = self.actor_rollout_wg.generate_sequences(gen_batch_output)
                else:
                    gen_batch_output = self.async_rollout_manager.generate_sequences(
                        gen_batch_output
                    )
                timing_raw.update(gen_batch_output.meta_info["timing"])
                gen_batch_output.meta_info.pop("timing", None)
            if self.config.algorithm.adv_estimator == AdvantageEstimator.REMAX:
                batch = self.with_baselines(batch, gen_batch, timing_raw)
            batch = batch.repeat(
                repeat_times=self.config.actor_rollout_ref.rollout.n, interleave=True
            )
            batch = batch.union(gen_batch_output)
            batch = self.learn(batch, metrics, timing_raw)

            rollout_data_dir = self.config.trainer.get("rollout_data_dir", None)
            if rollout_data_dir:
                self._log_rollout_data(
                    batch, self.reward_extra_infos_dict, timing_raw, rollout_data_dir
                )
            if (
                self.val_reward_fn is not None
                and self.config.trainer.test_freq > 0
                and (is_last_step or self.global_steps % self.config.trainer.test_freq == 0)
            ):
                with marked_timer("testing", timing_raw, color="green"):
                    val_metrics: dict[str, float] = self._validate()
                    if is_last_step:
                        self.last_val_metrics = val_metrics
                metrics.update(val_metrics)
            if self.config.trainer.save_freq > 0 and (
                is_last_step or self.global_steps % self.config.trainer.save_freq == 0
            ):
                with marked_timer("save_checkpoint", timing_raw, color="green"):
                    self._save_checkpoint()

        with marked_timer("stop_profile", timing_raw):
            next_step_profile = self.is_profiled(self.global_steps + 1)
            self._stop_profiling(
                self.curr_step_profile and not next_step_profile
                if self.config.global_profiler.profile_continuous_steps
                else self.curr_step_profile
            )
            self.prev_step_profile = self.curr_step_profile
            self.curr_step_profile = next_step_profile

        steps_duration = timing_raw["step"]
        self.max_steps_duration = max(self.max_steps_duration, steps_duration)
        metrics.update({"training/global_step": self.global_steps, "training/epoch": epoch})
        metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
        metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing_raw))
        n_gpus = self.resource_pool_manager.get_n_gpus()
        metrics.update(
            compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus)
        )
        if isinstance(self.train_dataloader.sampler, AbstractCurriculumSampler):
            self.train_dataloader.sampler.update(batch=batch)
        logger.log(data=metrics, step=self.global_steps)
        self.history.append(metrics)
        self.batch = batch
        return is_last_step

    def with_baselines(
        self, batch: DataProto, gen_batch: DataProto, timing_raw: dict[str, float]
    ) -> DataProto:
        """ReMax: the reward of a greedy response to each prompt."""
        with marked_timer("gen_max", timing_raw, color="purple"):
            gen_baseline_batch = deepcopy(gen_batch)
            gen_baseline_batch.meta_info["do_sample"] = False
            if not self.async_rollout_mode:
                gen_baseline_output = self.actor_rollout_wg.generate_sequences(gen_baseline_batch)
            else:
                gen_baseline_output = self.async_rollout_manager.generate_sequences(
                    gen_baseline_batch
                )
            batch = batch.union(gen_baseline_output)
            rm_scores = None
            if self.use_rm and "rm_scores" not in batch.batch.keys():
                rm_scores = self.rm_wg.compute_rm_score(batch)
                batch = batch.union(rm_scores)
            reward_baseline_tensor, _ = compute_reward(batch, self.reward_fn)
            reward_baseline_tensor = reward_baseline_tensor.sum(dim=-1)
            keys_to_pop = set(gen_baseline_output.batch.keys())
            if rm_scores is not None:
                keys_to_pop.update(rm_scores.batch.keys())
            batch.pop(batch_keys=list(keys_to_pop))
            batch.batch["reward_baselines"] = reward_baseline_tensor
        return batch

    def learn(
        self, batch: DataProto, metrics: dict[str, Any], timing_raw: dict[str, float]
    ) -> DataProto:
        """From responses to new weights."""
        if "response_mask" not in batch.batch.keys():
            batch.batch["response_mask"] = compute_response_mask(batch)
        if self.config.trainer.balance_batch:
            self._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = torch.sum(
            batch.batch["attention_mask"], dim=-1
        ).tolist()

        with marked_timer("reward", timing_raw, color="yellow"):
            if self.use_rm and "rm_scores" not in batch.batch.keys():
                reward_tensor = self.rm_wg.compute_rm_score(batch)
                batch = batch.union(reward_tensor)
            assert not self.config.reward_model.launch_reward_fn_async
            reward_tensor, reward_extra_infos_dict = compute_reward(batch, self.reward_fn)
        self.reward_extra_infos_dict = reward_extra_infos_dict

        with marked_timer("old_log_prob", timing_raw, color="blue"):
            old_log_prob = self.actor_rollout_wg.compute_log_prob(batch)
            entropys = old_log_prob.batch["entropys"]
            response_masks = batch.batch["response_mask"]
            loss_agg_mode = self.config.actor_rollout_ref.actor.loss_agg_mode
            entropy_agg = agg_loss(
                loss_mat=entropys, loss_mask=response_masks, loss_agg_mode=loss_agg_mode
            )
            metrics.update({"actor/entropy": entropy_agg.detach().item()})
            old_log_prob.batch.pop("entropys")
            batch = batch.union(old_log_prob)
            if "rollout_log_probs" in batch.batch.keys():
                metrics.update(calculate_debug_metrics(batch))
        if self.use_reference_policy:
            with marked_timer(str(Role.RefPolicy), timing_raw, color="olive"):
                if not self.ref_in_actor:
                    ref_log_prob = self.ref_policy_wg.compute_ref_log_prob(batch)
                else:
                    ref_log_prob = self.actor_rollout_wg.compute_ref_log_prob(batch)
                batch = batch.union(ref_log_prob)
        if self.use_critic:
            with marked_timer("values", timing_raw, color="cyan"):
                values = self.critic_wg.compute_values(batch)
                batch = batch.union(values)

        with marked_timer("adv", timing_raw, color="brown"):
            batch.batch["token_level_scores"] = reward_tensor
            if reward_extra_infos_dict:
                batch.non_tensor_batch.update(
                    {k: np.array(v) for k, v in reward_extra_infos_dict.items()}
                )
            if self.config.algorithm.use_kl_in_reward:
                batch, kl_metrics = apply_kl_penalty(
                    batch,
                    kl_ctrl=self.kl_ctrl_in_reward,
                    kl_penalty=self.config.algorithm.kl_penalty,
                )
                metrics.update(kl_metrics)
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            batch, is_metrics = self.compute_rollout_importance_weights_and_add_to_batch(batch)
            metrics.update(is_metrics)
            norm_adv_by_std_in_grpo = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
            batch = compute_advantage(
                batch,
                adv_estimator=self.config.algorithm.adv_estimator,
                gamma=self.config.algorithm.gamma,
                lam=self.config.algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
                config=self.config.algorithm,
            )

        if self.use_critic:
            with marked_timer("update_critic", timing_raw, color="pink"):
                critic_output = self.critic_wg.update_critic(batch)
            metrics.update(reduce_metrics(critic_output.meta_info["metrics"]))
        if self.config.trainer.critic_warmup <= self.global_steps:
            with marked_timer("update_actor", timing_raw, color="red"):
                batch.meta_info["multi_turn"] = (
                    self.config.actor_rollout_ref.rollout.multi_turn.enable
                )
                actor_output = self.actor_rollout_wg.update_actor(batch)
            metrics.update(reduce_metrics(actor_output.meta_info["metrics"]))
        return batch


def graded(data: DataProto, return_dict: bool = False) -> Any:
    """A reward manager as a function: a share of a point for each token with an odd number."""
    reward_tensor = (data.batch["responses"] % 2).float() / 4
    if not return_dict:
        return reward_tensor
    acc = [float(score > 0.4) for score in reward_tensor.sum(-1)]
    return {"reward_tensor": reward_tensor, "reward_extra_info": {"acc": acc}}


def role_worker_mapping() -> dict[Any, Any]:
    """The classes of the workers, as verl's programs give them."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

    return {
        Role.ActorRollout: ray.remote(ActorRolloutRefWorker),
        Role.Critic: ray.remote(CriticWorker),
        Role.RefPolicy: ray.remote(ActorRolloutRefWorker),
    }
