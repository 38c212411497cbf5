# SPDX-License-Identifier: Apache-2.0
"""Views of the training loop's objects, for a user's loop that is written for verl.

verl_config     the configuration, as an OmegaConf tree with verl's names and meanings
policy_view     the worker group of actor and rollout: responses have the columns of their prompts and
                `meta_info["timing"]`, and after an update the rollout has the new weights
blocking_view   any other worker group: only the columns that a method reads are sent to it
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quadriga.config import Config
from quadriga.config.placement import enabled_roles, role_pools
from quadriga.observe.metrics import reduce_metrics
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.trainer.ray_trainer import RayPPOTrainer
from quadriga.trainer.responses import drop_prompt_only, rollout_inputs
from quadriga.workers.base import CHAT_OBJECTS, MODEL_OBJECTS, SOLUTION_MESSAGES, model_inputs

RESPONSE_COLUMNS = "response_columns"
"""Key of `meta_info` of greedy responses: names of their object columns, which `compute_reward` drops."""
_TIMING = "timing_s/"  # prefix of metrics in seconds


def verl_config(config: Config, num_epochs: int = 1) -> DictConfig:
    """Convert a configuration to a read-only OmegaConf tree with verl's names.

    `trainer.critic_warmup` has verl's meaning, the first step in which the actor learns, and
    `trainer.total_epochs` is always a number.

    Args:
        config: the configuration.
        num_epochs: passes over the data, if the configuration only names a number of steps.
    """
    tree = config.model_dump(mode="json")
    policy = tree["actor_rollout_ref"]
    # A user's loop writes memory snapshots itself if this is the tool; here the profiler writes them.
    tool = config.global_profiler.tool
    policy["actor"]["profiler"]["tool"] = None if tool == "torch_memory" else tool
    policy["rollout"]["skip_rollout"] = False
    tree["reward_model"]["launch_reward_fn_async"] = False
    tree["trainer"]["total_epochs"] = config.trainer.max_epochs or num_epochs
    if config.trainer.critic_warmup:
        tree["trainer"]["critic_warmup"] += 1
    view = OmegaConf.create(tree)
    OmegaConf.set_struct(view, True)
    OmegaConf.set_readonly(view, True)
    return view


@dataclass(frozen=True)
class NumProcesses:
    """Stands in for the `ResourcePoolManager` of a trainer that has none, for `get_n_gpus`."""

    config: Config

    def get_n_gpus(self) -> int:
        """Number of training processes."""
        trainer = self.config.trainer
        if trainer.backend == "local":
            return 1
        # Roles may share a pool, which counts once.
        pools = set(role_pools(trainer, enabled_roles(self.config)).values())
        return sum(sum(trainer.processes_of(pool)) for pool in pools)


@dataclass(frozen=True)
class AdaptedMethod:
    """A method of a worker group that takes a batch, with functions before and after it.

    Attributes:
        method: the method.
        before: selects what the workers need of the batch.
        after: converts the output of the method, given the whole batch and the output.
        arguments: further arguments of the method.
    """

    method: Callable[..., Any]
    before: Callable[[DataProto], DataProto]
    after: Callable[[DataProto, DataProto], DataProto] = lambda batch, output: output
    arguments: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> DataProto:
        """Call the method with a batch, the only argument, and wait for the output."""
        (batch,) = (*args, *kwargs.values())
        return self.after(batch, self.method(self.before(batch), *self.arguments))

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Call the method without waiting. Get the result with `get()` of the future."""
        (batch,) = (*args, *kwargs.values())
        start = getattr(self.method, "remote", None)
        if start is None:
            # The object of a rollout in processes of its own has no remote methods: wait for the output,
            # and return a future that has it already.
            output = self.method(self.before(batch), *self.arguments)
            future = DataProtoFuture(itemgetter(0), [output], resolve=list)
        else:
            future = start(self.before(batch), *self.arguments)
        # `get()` of the future applies `after` to the output.
        return replace(future, dispatch_fn=partial(self.after, batch))


def blocking_view(group: Any, loop: RayPPOTrainer) -> Any:
    """View of a worker group whose methods wait for their outputs; `METHOD.remote` does not wait.

    Args:
        group: the group of a role. None: the role is not used.
        loop: the training loop to which the group belongs.

    Returns:
        The view; None without a group.
    """
    if group is None:
        return None
    # The group itself stays as it is, because Quadriga's own code calls its methods without waiting.
    view = copy.copy(group)
    view.methods = {name: replace(method, blocking=True) for name, method in group.methods.items()}
    # Make the methods attributes, so that some can be replaced below.
    view = view.as_worker()
    with_chats = (*MODEL_OBJECTS, *CHAT_OBJECTS, SOLUTION_MESSAGES)
    inputs_of_method: dict[str, Callable[[DataProto], DataProto]] = {
        "compute_log_prob": partial(model_inputs, with_routes=True),
        "compute_ref_log_prob": model_inputs,
        "compute_values": model_inputs,
        "compute_rm_score": partial(model_inputs, objects=with_chats),
        "update_actor": partial(loop.inputs.select, role="actor"),
        "update_critic": partial(loop.inputs.select, role="critic"),
    }
    for name, select_inputs in inputs_of_method.items():
        if name in view.methods:
            setattr(view, name, AdaptedMethod(getattr(view, name), select_inputs))
    return view


def policy_view(loop: RayPPOTrainer, step: Callable[[], int]) -> Any:
    """View of the actor's worker group that also generates, and publishes weights after an update.

    Args:
        loop: the training loop.
        step: returns the number of the step, which becomes the version of the weights.
    """
    view = blocking_view(loop.actor, loop)
    # The rollout is the actor's group itself, or an object of its own if it has its own processes.
    rollout = loop.validator.rollout
    generate = (view if rollout is loop.actor else rollout).generate_sequences

    def publish_weights(batch: DataProto, output: DataProto) -> DataProto:
        loop.weights.publish(step())
        return output

    select_prompts = partial(rollout_inputs, config=loop.config)
    view.generate_sequences = AdaptedMethod(generate, select_prompts, _add_prompt_columns)
    # The further argument of `compute_log_prob` is `with_sum_pi_squared`.
    view.compute_log_prob = replace(view.compute_log_prob, arguments=(loop.needs.sum_pi_squared,))
    view.update_actor = replace(view.update_actor, after=publish_weights)
    return view


def _add_prompt_columns(prompts: DataProto, responses: DataProto) -> DataProto:
    """Add the object columns of prompts to their responses, and seconds by phase to `meta_info`."""
    timing = {}
    for name, seconds in reduce_metrics(responses.meta_info["metrics"]).items():
        if name.startswith(_TIMING):
            timing[name.removeprefix(_TIMING)] = seconds
    meta_info: dict[str, Any] = {"timing": timing}
    # Greedy responses are the baselines of ReMax.
    if not prompts.meta_info.get("do_sample", True):
        meta_info[RESPONSE_COLUMNS] = list(responses.non_tensor_batch)
    columns = drop_prompt_only(prompts).non_tensor_batch
    return DataProto(responses.batch, {**columns, **responses.non_tensor_batch}, meta_info)
