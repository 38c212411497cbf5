# SPDX-License-Identifier: Apache-2.0
"""Checks of a run before a model is loaded, made on the configuration and the files it names."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from quadriga.config import Config, load_config, training_findings
from quadriga.config.multi_turn import LOOPS
from quadriga.data import load_tokenizer
from quadriga.data.prompt_lengths import NO_CONTEXT
from quadriga.errors import DataError, QuadrigaError, RewardError
from quadriga.observe.tracking.services import check_services
from quadriga.rewards import RewardManager
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.scoring import WITHOUT_TRUTH, ScoreFunction, grader_name
from quadriga.trainer.asynchronous.simulation import advice
from quadriga.trainer.build import (
    build_reward,
    build_tokenizer,
    build_train_loader,
    build_val_loader,
)
from quadriga.trainer.roles import configured_estimator
from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.settings import CONFIGURATION
from quadriga.workers.base import UpdateInputs
from quadriga.workers.generation import prompt_context
from quadriga.workers.models import sizes_of_models
from quadriga.workers.rollout_engines import rollout_engine_class

ANSWER_FORMS = (
    "\\boxed{{{}}}",
    "#### {}",
    "Answer: {}",
    "<answer>{}</answer>",
    "<think></think><answer>{}</answer>",
)
"""Forms in which graders expect an answer."""
WITHOUT_ANSWER = WITHOUT_TRUTH | {"code"}
"""Built-in graders whose ground truth is not itself a correct response."""
MAX_ANSWER_CHARS = 100


def preflight(config: Config, recorded: Path | None = None) -> "Preflight":
    """Try everything that a run does before its models are loaded.

    Every part is tried, even after an error. Network access is used only where a run would use it,
    and the run's directory is not touched.

    Args:
        config: the resolved configuration.
        recorded: directory of a run without `async_training`. Its lengths and times are used to
            simulate asynchronous training; None: lengths and times are assumed.
    """
    checks = Preflight(config)
    checks.try_algorithm()
    checks.try_models()
    checks.try_data_and_rewards()
    checks.simulate(recorded)
    # Several parts may fail for the same reason.
    checks.problems = list({str(problem): problem for problem in checks.problems}.values())
    return checks


class Preflight:
    """The checks of a configuration, and what they have found.

    Attributes:
        problems: errors that would keep the run from starting.
        notices: facts that the user should know.
        fields: fields that the advantage estimator reads; None without an estimator.
        num_prompts: rows of the training data; None if they cannot be read.
        models: sizes and costs of the models to train.
        simulated: estimates of what asynchronous training would gain.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        findings, self.notices = training_findings(config)
        self.problems: list[QuadrigaError] = list(findings)
        self.fields: tuple[str, ...] | None = None
        self.num_prompts: int | None = None
        self.models: list[str] = []
        self.simulated: list[str] = []
        # Keys with wrong values. The files and models that they name are not tried.
        self._wrong_keys = {problem.where for problem in findings}
        self._tokenizer: Any = None
        self._context = NO_CONTEXT

    def _try(self, check: Callable[..., Any], *args: Any) -> Any:
        """Call a function; record its error if it fails. Returns its result, or None if it fails."""
        try:
            return check(*args)
        except QuadrigaError as error:
            self.problems.append(error)
            return None

    def try_algorithm(self) -> None:
        """Look up estimator, loss, engine and trackers."""
        config = self.config
        self._try(check_services, config.trainer.loggers)
        if config.task == "rl":
            estimator = self._try(configured_estimator, config)
            if estimator is not None:
                self.fields = estimator.fields
            self._try(UpdateInputs, config)
            self._try(rollout_engine_class, config)

    def try_models(self) -> None:
        """Read the models' configurations, and load the tokenizer."""
        if "actor_rollout_ref.model.path" in self._wrong_keys:
            return
        config = self.config
        # An estimator that reads values needs a critic.
        has_critic = "values" in (self.fields or ())
        sizes = self._try(lambda: list(sizes_of_models(config, has_critic=has_critic)))
        self.models = sizes or []
        self._tokenizer = self._try(build_tokenizer, config)
        if self._tokenizer is not None:
            self._context = self._try(prompt_context, config, self._tokenizer) or NO_CONTEXT

    def try_data_and_rewards(self) -> None:
        """Read the data, and grade the first row."""
        config = self.config
        data = config.data
        train = None
        val = None
        if self._tokenizer is not None:
            if "data.train_files" not in self._wrong_keys:
                train = self._try(build_train_loader, config, self._tokenizer, self._context)
            if "data.val_files" not in self._wrong_keys:
                val = self._try(build_val_loader, config, self._tokenizer, self._context)

        if config.task == "rl" and "custom_reward_function.path" not in self._wrong_keys:
            reward = self._try(build_reward, config, self._tokenizer, train, val)
            if reward is not None:
                with closing(reward):
                    if train is not None:
                        self._try(self._grade_first_row, reward, train.dataset)
        if train is not None:
            # Only the sampler of a mixture knows how many rows an epoch has.
            self.num_prompts = len(train.sampler if data.mixture else train.dataset)

    def _grade_first_row(self, reward: RewardManager, rows: Any) -> None:
        """Grade the ground truth of the first row as if it were a response.

        Adds a notice if nothing shows that the grader compares with the ground truth: as a
        response, the truth scores neither above 0 nor more than an empty response; and in none of
        the `ANSWER_FORMS` above does it score above both.
        Only graders that run on this machine are called. A row with a user's agent loop is not
        graded, which a notice says.

        Args:
            reward: the reward manager.
            rows: the training data.

        Raises:
            RewardError: the grader fails.
        """
        # Without grades, a reward model or the environment gives the score.
        if not isinstance(reward, NaiveRewardManager) or not reward.has_grades:
            return
        row = rows[0]
        facts_of_row = self._facts_of(row)
        if facts_of_row is None:
            return
        truth = facts_of_row["ground_truth"]
        place = row.get("source_row", "the first row")

        # An error of the grader would end the run, so it is a problem; a low score is a notice.
        (outcome,) = reward.submit([self._sample_with(facts_of_row, str(truth))]).result()
        if outcome.error:
            raise RewardError(
                f"{place}, graded with its ground truth as the response",
                got=f"an error of the grader:\n{outcome.error.rstrip()}\n",
                expected="a score",
                fix="Correct the row, or the function of custom_reward_function.path.",
            )
        score = outcome.score
        if score > 0 or not _is_answer(reward.function, facts_of_row):
            return

        forms = [form.format(truth) for form in ANSWER_FORMS]
        responses = ["", *forms]
        samples = [self._sample_with(facts_of_row, response) for response in responses]
        outcomes = reward.submit(samples).result()
        empty_score, *scores = [0.0 if outcome.error else outcome.score for outcome in outcomes]
        # Some rewards are never above 0. Then it is enough to score more than an empty response.
        beats_empty = score > empty_score
        # A form may lose less than an empty response for its format alone, whatever its answer is.
        # So it must also score above 0.
        has_scoring_form = max(scores) > max(0.0, empty_score)
        if beats_empty or has_scoring_form:
            return
        path = reward.function.path
        setting = "" if path is None else f" custom_reward_function.path={path}"
        self.notices.append(
            f"{place}: its ground truth {str(truth)!r}, graded as a response, scores "
            f"{score:g}, and no more as {', '.join(map(repr, forms))}. The grader reads "
            "another column or compares wrongly, unless it expects yet another format or ignores "
            "the ground truth. To check it, write right answers into a column `responses` of the "
            f"data and run `quadriga eval FILE{setting}`."
        )

    def _facts_of(self, row: Any) -> dict[str, Any] | None:
        """Collect everything that a grader receives besides the response.

        Returns:
            The arguments of a grader by name. None, with a notice, if the row has a user's agent
            loop, which may add arguments that are not known here.
        """
        rollout = self.config.actor_rollout_ref.rollout
        extra_info = row.get("extra_info") or {}
        if rollout.mode == "async":
            agent = row.get("agent_name") or rollout.agent.default_agent_loop
            if agent not in LOOPS:
                self.notices.append(
                    f"The first row is not graded here: its agent loop {agent} may add to what the "
                    "grader reads."
                )
                return None
            # What the shortest conversation adds (`rewards.samples.CONVERSATION_COLUMNS`): one turn
            # without a tool call.
            has_user = (row.get("interaction_kwargs") or {}).get("name") is not None
            tool_names = [tool["function"]["name"] for tool in self._context.tools_of(row)]
            extra_info = extra_info | {
                "num_turns": 1,
                "finish_reason": "stop",
                "tool_rewards": dict.fromkeys(tool_names, 0.0),
                "turn_scores": [0.0] if has_user else [],
            }
        return {
            "data_source": row.get(self.config.data.reward_fn_key),
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": extra_info,
        }

    def _sample_with(self, facts: dict[str, Any], response: str) -> dict[str, Any]:
        """Add a response to the facts of a row, under every name under which graders read it."""
        facts = {
            **facts,
            "solution_str": response,
            "solution_with_special_tokens": f"{response}{self._tokenizer.eos_token or ''}",
        }
        if self.config.actor_rollout_ref.rollout.mode == "async":
            facts["solution_messages"] = [{"role": "assistant", "content": response}]
        return facts

    def simulate(self, recorded: Path | None) -> None:
        """Simulate asynchronous training, if it is enabled.

        Args:
            recorded: directory of a run with measured lengths and times. None: assume some.
        """
        run = None
        # Read in any case, so that an error in it is reported.
        if recorded is not None:
            run = self._try(read_recorded_run, recorded)
        if self.config.async_training.enable and not self._wrong_keys:
            self.simulated = list(advice(self.config, run))


def _is_answer(function: ScoreFunction, facts: dict[str, Any]) -> bool:
    """Whether the ground truth of a row may itself be a correct response.

    Tests of a program, lists of accepted answers and rubrics are not responses. The ground truths
    of conversations with tools or a user are not taken for responses either, because graders may
    read what the tools or the user return.

    Args:
        function: the score function.
        facts: facts of the row (`Preflight._facts_of`).
    """
    if function.path is None and grader_name(facts["data_source"]) in WITHOUT_ANSWER:
        return False
    if any(facts["extra_info"].get(name) for name in ("tool_rewards", "turn_scores")):
        return False
    truth = facts["ground_truth"]
    if not isinstance(truth, str | int | float):
        return False
    text = str(truth).strip()
    is_short = 0 < len(text) <= MAX_ANSWER_CHARS and "\n" not in text
    # A text that begins with a bracket is probably a list or a dictionary in JSON.
    return is_short and text[0] not in "{["


def read_recorded_run(run: Path) -> tuple[Config, list[dict[str, Any]]]:
    """Read the lengths and times that a run without `async_training` has recorded.

    Args:
        run: the run's directory.

    Returns:
        Its configuration, and for each step the lengths of its responses and the seconds of its
        parts, in the form that `fit_recorded_run` of trainer/asynchronous/simulation.py reads.

    Raises:
        DataError: the run has not recorded metrics and responses, or has used `async_training`, or
            its steps differ in their numbers of responses.
    """
    folder = RunFolder(run)
    config = load_config([], [run / CONFIGURATION]).config
    if not folder.has_training_responses or not folder.metrics or config.async_training.enable:
        raise DataError(
            f"--recorded {run}",
            got="a run without metrics or responses, or with async_training",
            expected="metrics and responses (trainer.rollout_record) of a run in lockstep",
        )

    steps = []
    # Pairs of the number of prompts and of responses to a prompt.
    shapes = set()
    for step, metrics in folder.metrics.items():
        gen_s = metrics.get("timing_s/gen")
        # The validation before training has no such time, and skipped steps have no responses.
        if gen_s is None or step not in folder.responses:
            continue
        reward_s = metrics.get("timing_s/reward", 0.0)
        lengths = _response_lengths(folder, config, step)
        shapes |= {(len(lengths), len(lengths_of_prompt)) for lengths_of_prompt in lengths}
        steps.append(
            {
                "lengths": lengths,
                "gen_s": gen_s,
                "train_s": metrics["timing_s/step"] - gen_s - reward_s,
                "reward_s": reward_s,
            }
        )
    if len(shapes) != 1:
        raise DataError(
            f"--recorded {run}",
            got=f"{len(steps)} steps of {len(shapes)} sizes",
            expected="steps with the same number of prompts, and of responses to each",
            fix="Name a run whose batch size did not change, and whose rollouts have one response.",
        )
    return config, steps


def _response_lengths(folder: RunFolder, config: Config, step: int) -> list[list[int]]:
    """Number of tokens of each response of a step, at least 1, in a list for each prompt."""
    # The rollout record has the tokens, other files only the texts.
    if step in folder.record.steps():
        rows = folder.record.read(step, columns=["uid", "response_ids"]).rows
        uids = rows.column("uid").to_pylist()
        counts = pc.list_value_length(rows.column("response_ids")).to_pylist()
    else:
        tokenizer = load_tokenizer(config.data.tokenizer or config.actor_rollout_ref.model.path)
        samples = folder.responses[step]()
        uids = [sample["uid"] for sample in samples]
        counts = []
        for sample in samples:
            tokens = tokenizer(sample["output_with_special_tokens"], add_special_tokens=False)
            counts.append(len(tokens["input_ids"]))
    lengths = defaultdict(list)
    for uid, count in zip(uids, counts, strict=True):
        # A simulated response has at least one token, because its version is that of a token.
        lengths[uid].append(max(1, count))
    return list(lengths.values())
