# SPDX-License-Identifier: Apache-2.0
"""What can be known of a run before a model is loaded: the checks of its start, made on the files that it names."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quadriga.algorithms.registry import choose_estimator
from quadriga.config import Config, training_findings
from quadriga.errors import QuadrigaError, RewardError
from quadriga.observe.tracking.services import check_services
from quadriga.rewards import RewardManager
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.trainer.build import build_reward, build_tokenizer, build_train_loader, build_val_loader
from quadriga.workers.base import UpdateInputs
from quadriga.workers.models import sizes_of_models
from quadriga.workers.rollout_engines import rollout_engine_class


class Preflight(NamedTuple):
    """What was found."""

    problems: list[QuadrigaError]  # what would keep the run from starting
    notices: list[str]  # what its user should know
    fields: tuple[str, ...] | None  # what the advantage estimator reads; None: it is not known
    num_prompts: int | None  # rows of the training data; None: they cannot be read
    models: list[str]  # of those that learn, their sizes and costs


def preflight(config: Config) -> Preflight:
    """Try what a run does before its models are loaded, each part by itself; no network is needed that a run would not
    need, and nothing of the run's directory is touched."""
    configured, notices = training_findings(config)
    problems: list[QuadrigaError] = list(configured)
    missing = {one.where for one in problems}

    def tried(check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except QuadrigaError as error:
            problems.append(error)
            return None

    tried(check_services, config.trainer.loggers)
    is_rl, algorithm, fields = config.task == "rl", config.algorithm, None
    if is_rl:
        estimator = tried(choose_estimator, algorithm.adv_estimator, algorithm.adv_options, dict(algorithm))
        fields = estimator and estimator.fields
        tried(UpdateInputs, config)
        tried(rollout_engine_class, config)
    models: list[str] = []
    reward = train = val = tokenizer = None
    if "actor_rollout_ref.model.path" not in missing:
        models = tried(lambda: list(sizes_of_models(config, has_critic="values" in (fields or ())))) or []
        tokenizer = tried(build_tokenizer, config)
    if tokenizer is not None and "data.train_files" not in missing:
        train = tried(build_train_loader, config, tokenizer)
    if tokenizer is not None and "data.val_files" not in missing and config.data.val_files:
        val = tried(build_val_loader, config, tokenizer)
    if is_rl and "custom_reward_function.path" not in missing:
        reward = tried(build_reward, config, tokenizer, train, val)
    if reward is not None:
        if train is not None:
            tried(_grade_first_row, reward, train.dataset, config.data.reward_fn_key)
        reward.close()
    told = {str(one): one for one in problems}
    rows = train and (train.sampler if config.data.mixture else train.dataset)
    return Preflight(list(told.values()), notices, fields, None if rows is None else len(rows), models)


def _grade_first_row(reward: RewardManager, rows: Any, reward_fn_key: str) -> None:
    """Grade the ground truth of the first row as if it were a response: RewardError if its grader fails. Others than
    the graders of this machine are not called."""
    if not isinstance(reward, NaiveRewardManager) or not reward.has_grades:
        return
    row = rows[0]
    truth = (row.get("reward_model") or {}).get("ground_truth")
    facts = {"data_source": row.get(reward_fn_key), "solution_str": str(truth), "ground_truth": truth}
    (outcome,) = reward.submit([{**facts, "extra_info": row.get("extra_info") or {}}]).result()
    if outcome.error:
        where = f"{row.get('source_row', 'the first row')}, graded with its ground truth as the response"
        expected, fix = "a score", "Correct the row, or the function of custom_reward_function.path."
        raise RewardError(where, got=f"an error of the grader:\n{outcome.error.rstrip()}\n", expected=expected, fix=fix)
