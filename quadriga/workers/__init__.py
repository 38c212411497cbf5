# SPDX-License-Identifier: Apache-2.0
"""One class per role. They hold engines, say how their arguments travel, and know nothing of processes or of Ray."""

from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.critic import CriticWorker
from quadriga.workers.reward_model import RewardModelWorker
from quadriga.workers.rollout import RolloutWorker
from quadriga.workers.teacher import TeacherWorker
