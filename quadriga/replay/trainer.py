# SPDX-License-Identifier: Apache-2.0
"""The trainer and the policy worker of a replay, which take responses from the record.

record ──> batch ──> [grade again] ──> log-probs ──> advantages ──> update
                           │                             │             │
                        rewards                      advantages     update      phases, after
                                                                                one of which a
                                                                                replay ends
"""

import pdb
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.errors import DataError
from quadriga.observe.metrics import reduce_metrics
from quadriga.observe.records import RecordFolder
from quadriga.protocol import DataProto
from quadriga.replay.batch import RecordedStep
from quadriga.replay.compare import compare_rows
from quadriga.single_controller import Dispatch, register
from quadriga.trainer.metrics import data_metrics
from quadriga.trainer.ray_trainer import RayPPOTrainer
from quadriga.trainer.record_rows import record_table
from quadriga.trainer.responses import grade
from quadriga.trainer.roles import configured_estimator
from quadriga.workers import ActorRolloutRefWorker

REWARDS = "rewards"
ADVANTAGES = "advantages"
UPDATE = "update"
PHASES = (REWARDS, ADVANTAGES, UPDATE)
"""Phases of a step after which a replay can end, in order."""


class PhaseReachedError(Exception):
    """Ends a replay in the middle of a step, after the phase `until`.

    Args:
        batch: rows of the step with everything that was computed for them.
        metrics: metrics of the step so far.
    """

    def __init__(self, batch: DataProto, metrics: dict[str, float]) -> None:
        super().__init__()
        self.batch = batch
        self.metrics = metrics


class ReplayWorker(ActorRolloutRefWorker):
    """The policy without its rollout engine: responses come from the record."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, role: str, **options: Any
    ) -> None:
        super().__init__(config, tokenizer, role, **options)
        # An engine would take memory, and its package may not be installed here.
        self.has_rollout = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> None:
        """Set the version. There is no engine to send the weights to."""
        self.weight_version = version


class ReplayTrainer(RayPPOTrainer):
    """Trains on the recorded responses of each step.

    Attributes:
        recorded: the recorded rollouts of all steps.
        last_step: the step that is replayed. Earlier steps are only trained.
        until: phase of the replayed step after which the replay ends.
        grades_again: whether the responses of the replayed step are graded.
        debugs: whether to start the debugger once in the replayed step, after the first phase with
            a difference or after `debugged_phase`.
        debugged_phase: phase after which the debugger starts without a difference too; "": none.
    """

    recorded: RecordFolder
    last_step: int = 0
    until: str = UPDATE
    grades_again: bool = False
    debugs: bool = False
    debugged_phase: str = ""

    def train_step(self) -> DataProto:
        """Train the next step. A replay of rewards passes over the steps before the replayed one."""
        # Rewards do not depend on the weights, so earlier steps need no training.
        while self.until == REWARDS and self.global_steps + 1 < self.last_step:
            if self.skips_next_step:
                self.skip_step(self.rows_to_skip)
                continue
            # Read the prompts that the step took, and tell sampler and data set about them, so that
            # the next prompts are those of the run.
            with self.measured():
                for batch in self.batches():
                    self.hand_back(batch)
        return super().train_step()

    def batches(self) -> Iterator[DataProto]:
        """Yield one batch: the recorded responses of the step, instead of generating them.

        Their scores are recorded ones too, unless the step is to be graded again.

        Raises:
            DataError: the record lacks something that the step needs, or the data have changed.
            PhaseReachedError: the replay ends with the rewards of this step.
        """
        step = self.global_steps
        path = self.recorded.path(step)
        record = self.recorded.read(step)
        facts = record.facts
        is_thinned = facts.get("is_thinned", False)
        if is_thinned and "reward_extra" in configured_estimator(self.config).fields:
            raise DataError(
                str(path),
                got="a step without the values that graders returned beside the score",
                expected="these values, which algorithm.adv_estimator="
                f"{self.config.algorithm.adv_estimator} reads",
                fix="The record was thinned, which removes them. A larger "
                "trainer.rollout_record_gib keeps them in further runs.",
            )
        prompts = []
        # With dynamic sampling, a step takes several batches of prompts.
        for _ in range(int(facts["metrics"].get("filter_groups/num_batches", 1))):
            prompts.append(self.next_prompts(num_before=sum(map(len, prompts))))
        policy = self.config.actor_rollout_ref
        needs_grading = self.grades_again and step == self.last_step
        batch = RecordedStep(record, path).batch(
            prompts[0] if len(prompts) == 1 else DataProto.concat(prompts),
            self.tokenizer.pad_token_id,
            has_own_prompts=policy.rollout.mode == "async",
            with_scores=not needs_grading,
            with_routes=policy.actor.router_replay == "rollout",
        )
        if self.filters_groups:
            # As in the run, because learning-rate schedules depend on it.
            self.predict_num_steps(batch)
        # A replay that goes on is graded by `learn`.
        if needs_grading and self.until == REWARDS:
            grade(self.reward, batch)
            self.finish_phase(REWARDS, batch)
        yield batch

    def compute_advantages(self, batch: DataProto) -> None:
        """Compute the advantages, then call `finish_phase`."""
        super().compute_advantages(batch)
        self.finish_phase(ADVANTAGES, batch)

    def learn(self, batch: DataProto) -> DataProto:
        """Update the models from responses, then call `finish_phase`."""
        learned = super().learn(batch)
        self.finish_phase(UPDATE, learned)
        return learned

    def finish_phase(self, phase: str, batch: DataProto) -> None:
        """Start the debugger if it is due after a phase, and end the replay after its last phase.

        Does nothing in steps before the replayed one.

        Args:
            phase: the phase that has ended.
            batch: rows of the step with everything that was computed for them.

        Raises:
            PhaseReachedError: the replay ends here. It is not raised after the update, which ends
                the step by itself.
        """
        if self.global_steps != self.last_step:
            return
        if self.debugs:
            recorded = self.recorded.read(self.last_step).rows
            rows = record_table(batch, self.config.data)
            differences = [entry for entry in compare_rows(recorded, rows) if not entry.is_equal]
            if differences or phase == self.debugged_phase:
                self.debugs = False
                # The progress bar would draw over the debugger's prompt.
                self.progress.close()
                debug(phase, batch, differences)
        if phase == self.until and phase != UPDATE:
            # Compute the metrics so far. The trainer does it at the end of a step, which this step
            # does not reach.
            if phase == REWARDS:
                metrics = reduce_metrics(batch.meta_info["metrics"])
            else:
                metrics = reduce_metrics(self.batch_metrics) | data_metrics(batch)
            raise PhaseReachedError(batch, metrics)


def debug(phase: str, batch: DataProto, differences: list[Any]) -> None:
    """Start the debugger in the replayed step.

    Args:
        phase: the phase that has ended.
        batch: rows of the step with everything that was computed for them.
        differences: columns that differ from the record.
    """
    names = ", ".join(entry.name for entry in differences) or "none"
    print(f"after the {phase}; columns that differ from the record: {names}")
    print(
        "Variables: `batch` has the rows, `differences` the columns. The command `up` goes to the "
        "trainer's method."
    )
    pdb.set_trace()
