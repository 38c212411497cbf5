# SPDX-License-Identifier: Apache-2.0
"""`quadriga eval`: grade a model, a run or a checkpoint on validation data, or a file of responses."""

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.config import Config
from quadriga.data.files import TABLE_SUFFIXES
from quadriga.trainer.checkpoint import model_folder
from quadriga.trainer.evaluate import Grades, evaluate
from quadriga.trainer.response_files import score_file
from quadriga.trainer.validate import first_samples


def main(argv: Sequence[str]) -> int:
    """Answer every prompt of data.val_files with the sampling of rollout.val_kwargs, and print the metrics; of a file
    that has responses, grade these."""
    parser = argparse.ArgumentParser(prog="quadriga eval", description=main.__doc__)
    parser.add_argument(
        "model", help="a Hugging Face folder or name, a run's directory, one of its global_step_N; or a parquet, json "
        "or jsonl file with responses",
    )  # fmt: skip
    parser.add_argument("--response-key", default="responses", help="of such a file: column of the responses")
    parser.add_argument("--reward-model-key", default="reward_model", help="of such a file: column of the ground truth")
    add_config_arguments(parser)
    parser.add_argument("--data", action="append", default=[], help="a file of prompts, as data.val_files")
    parser.add_argument("--n", type=int, help="responses to each prompt, as rollout.val_kwargs.n")
    arguments = parser.parse_intermixed_args(list(argv))
    if arguments.data:
        arguments.overrides.append(f"data.val_files={json.dumps(arguments.data)}")
    if arguments.n is not None:
        arguments.overrides.append(f"actor_rollout_ref.rollout.val_kwargs.n={arguments.n}")
    if Path(arguments.model).suffix in TABLE_SUFFIXES:
        score(load_from(arguments), arguments.model, arguments.response_key, arguments.reward_model_key)
        return 0
    arguments.overrides.append(f"actor_rollout_ref.model.path={model_folder(arguments.model)}")
    config = load_from(arguments)
    grades = evaluate(config)
    for row in first_samples(grades.rows, config.trainer.log_val_generations):
        print(f"  {row['input']!r}\n    -> {row['output']!r} (score {row['score']:g}, truth {row['ground_truth']!r})")
    _print(grades)
    return 0


def score(config: Config, path: str, response_key: str = "responses", reward_model_key: str = "reward_model") -> None:
    """Grade the responses in a file, and print the metrics; as `score_file`."""
    _print(score_file(config, path, response_key, reward_model_key))


def _print(grades: Grades) -> None:
    """A line for each metric, with its 95 % confidence interval; the best of k scores of 0 or 1 is pass@k."""
    is_binary = all(row["score"] in (0, 1) for row in grades.rows)
    width = max((len(name) for name in grades.metrics), default=0)
    for name, value in grades.metrics.items():
        line = f"{name:<{width}}  {value:.4f}"
        if name in grades.intervals:
            low, high = grades.intervals[name]
            line += f"  [{low:.4f}, {high:.4f}]" if math.isfinite(low) else "  [of one prompt]"
        if is_binary and (best := re.search(r"/reward/best@(\d+)/mean$", name)):
            line += f"  pass@{best[1]}"
        print(line)
