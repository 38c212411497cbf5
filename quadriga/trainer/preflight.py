# SPDX-License-Identifier: Apache-2.0
"""What can be known of a run before a model is loaded: the checks of its start, made on the files that it names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.algorithms.registry import choose_estimator
from quadriga.config import Config, load_config, training_findings
from quadriga.config.multi_turn import LOOPS
from quadriga.data import load_tokenizer
from quadriga.data.prompt_lengths import NO_CONTEXT, PromptContext
from quadriga.errors import DataError, QuadrigaError, RewardError
from quadriga.observe.tracking.jsonl import METRICS_FILE
from quadriga.observe.tracking.services import check_services
from quadriga.rewards import RewardManager
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.samples import OF_CONVERSATION
from quadriga.trainer.asynchronous.simulation import advice
from quadriga.trainer.build import (
    build_reward,
    build_tokenizer,
    build_train_loader,
    build_val_loader,
)
from quadriga.workers.base import UpdateInputs
from quadriga.workers.generation import prompt_context
from quadriga.workers.models import sizes_of_models
from quadriga.workers.rollout_engines import rollout_engine_class


class Preflight(NamedTuple):
    """What was found."""

    problems: list[QuadrigaError]  # what would keep the run from starting
    notices: list[str]  # what its user should know
    fields: tuple[str, ...] | None  # what the advantage estimator reads; None: it is not known
    num_prompts: int | None  # rows of the training data; None: they cannot be read
    models: list[str]  # of those that learn, their sizes and costs
    simulated: list[str]  # what generation beside training would bring


def preflight(config: Config, recorded: Path | None = None) -> Preflight:
    """Try what a run does before its models are loaded, each part by itself; no network is needed that a run would not
    need, and nothing of the run's directory is touched. `recorded`: the directory of a run in lockstep, whose lengths
    and seconds are simulated."""
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
        estimator = tried(
            choose_estimator, algorithm.adv_estimator, algorithm.adv_options, dict(algorithm)
        )
        fields = estimator and estimator.fields
        tried(UpdateInputs, config)
        tried(rollout_engine_class, config)
    models: list[str] = []
    reward = train = val = tokenizer = context = None
    if "actor_rollout_ref.model.path" not in missing:
        models = (
            tried(lambda: list(sizes_of_models(config, has_critic="values" in (fields or ()))))
            or []
        )
        tokenizer = tried(build_tokenizer, config)
        context = tokenizer and tried(prompt_context, config, tokenizer)
    context = context or NO_CONTEXT
    if tokenizer is not None and "data.train_files" not in missing:
        train = tried(build_train_loader, config, tokenizer, context)
    if tokenizer is not None and "data.val_files" not in missing and config.data.val_files:
        val = tried(build_val_loader, config, tokenizer, context)
    if is_rl and "custom_reward_function.path" not in missing:
        reward = tried(build_reward, config, tokenizer, train, val)
    if reward is not None:
        if train is not None:
            notice = tried(_grade_first_row, reward, train.dataset, config, tokenizer, context)
            notices += [notice] if notice else []
        reward.close()
    run = recorded and tried(recorded_run, recorded)
    simulated = list(advice(config, run)) if config.async_training.enable and not configured else []
    told = {str(one): one for one in problems}
    rows = train and (train.sampler if config.data.mixture else train.dataset)
    return Preflight(
        list(told.values()), notices, fields, None if rows is None else len(rows), models, simulated
    )


def recorded_run(run: Path) -> tuple[Config, list[dict[str, Any]]]:
    """The configuration of a run, and what its metrics and its written responses say of each step; see `recorded` of
    trainer/asynchronous/simulation.py. Raises DataError: it has not written them."""
    config = load_config([], [run / "config.yaml"]).config
    folder = Path(config.trainer.rollout_data_dir or run / "no responses")
    if not folder.is_dir() or not (run / METRICS_FILE).exists() or config.async_training.enable:
        expected = "metrics and responses (trainer.rollout_data_dir) of a run in lockstep"
        raise DataError(f"--recorded {run}", got="none", expected=expected)
    tokenizer = load_tokenizer(config.data.tokenizer or config.actor_rollout_ref.model.path)
    found = []
    for line in _lines(run / METRICS_FILE):
        if (gen_s := line.get("timing_s/gen")) is None:
            continue
        lengths: dict[str, list[int]] = {}
        for row in _lines(folder / f"{line['step']}.jsonl"):
            tokens = tokenizer(row["output_with_special_tokens"], add_special_tokens=False)[
                "input_ids"
            ]
            lengths.setdefault(row["uid"], []).append(max(1, len(tokens)))
        reward_s = line.get("timing_s/reward", 0.0)
        train_s = line["timing_s/step"] - gen_s - reward_s
        found.append(
            {
                "lengths": [*lengths.values()],
                "gen_s": gen_s,
                "train_s": train_s,
                "reward_s": reward_s,
            }
        )
    return config, found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def _grade_first_row(
    reward: RewardManager, rows: Any, config: Config, tokenizer: Any, context: PromptContext
) -> str:
    """Grade the ground truth of the first row as if it were a response.

    Only graders of this machine are called, and none for a row that an agent loop of the user's
    own leads. Returns a notice on such a row, else "".

    Raises:
        RewardError: the grader fails.
    """
    if not isinstance(reward, NaiveRewardManager) or not reward.has_grades:
        return ""
    row, rollout = rows[0], config.actor_rollout_ref.rollout
    truth = (row.get("reward_model") or {}).get("ground_truth")
    extra_info = row.get("extra_info") or {}
    facts = {
        "data_source": row.get(config.data.reward_fn_key),
        "solution_str": str(truth),
        "solution_with_special_tokens": f"{truth}{tokenizer.eos_token or ''}",
        "ground_truth": truth,
    }
    if rollout.mode == "async":
        agent = row.get("agent_name") or rollout.agent.default_agent_loop
        if agent not in LOOPS:
            return f"The first row is not graded here: its agent loop {agent} may add to what the grader reads."
        has_user = (row.get("interaction_kwargs") or {}).get("name") is not None
        tool_names = [tool["function"]["name"] for tool in context.tools_of(row)]
        values = (1, "stop", dict.fromkeys(tool_names, 0.0), [0.0] * has_user)
        extra_info = extra_info | dict(zip(OF_CONVERSATION, values, strict=True))
        facts["solution_messages"] = [{"role": "assistant", "content": str(truth)}]
    (outcome,) = reward.submit([{**facts, "extra_info": extra_info}]).result()
    if outcome.error:
        where = f"{row.get('source_row', 'the first row')}, graded with its ground truth as the response"
        expected, fix = (
            "a score",
            "Correct the row, or the function of custom_reward_function.path.",
        )
        raise RewardError(
            where,
            got=f"an error of the grader:\n{outcome.error.rstrip()}\n",
            expected=expected,
            fix=fix,
        )
    return ""
