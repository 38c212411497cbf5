# SPDX-License-Identifier: Apache-2.0
"""Worker classes, one per role. They hold engines, and are independent of processes and Ray."""

from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.critic import CriticWorker
from quadriga.workers.reward_model import RewardModelWorker
from quadriga.workers.rollout import RolloutWorker
from quadriga.workers.teacher import TeacherWorker
