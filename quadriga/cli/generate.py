# SPDX-License-Identifier: Apache-2.0
"""`quadriga generate` and `eval`: responses of a model, a run or a checkpoint to prompts, and their grades."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.config import Config
from quadriga.data.files import TABLE_SUFFIXES
from quadriga.data.media import IMAGE
from quadriga.errors import ConfigError
from quadriga.streams import log_to
from quadriga.trainer.checkpoint import model_folder
from quadriga.trainer.evaluate import Grades, answer, answer_files, evaluate, score_file
from quadriga.trainer.validate import first_samples


def main(argv: Sequence[str]) -> int:
    """Print the responses to one or more prompts, or write those to the rows of --data with --output."""
    parser = argparse.ArgumentParser(prog="quadriga generate", description=main.__doc__)
    parser.add_argument(
        "model",
        help="a Hugging Face folder or name, a run's directory, or one of its global_step_N",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="what the user says; may be repeated"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        help="a file of prompts in its column data.prompt_key, as data.val_files",
    )
    parser.add_argument(
        "--output", type=Path, help="a parquet file to write: the rows of --data and a column `responses`. The same "
        "call after one that was cut short goes on",
    )  # fmt: skip
    parser.add_argument("--n", type=int, help="responses to each prompt, as rollout.n")
    parser.add_argument(
        "--image", action="append", default=[], help="a file for an <image> in the prompts, in their order; may be "
        "repeated. A single prompt without <image> gets its images in front",
    )  # fmt: skip
    parser.add_argument("--system", help="a system message (default: the chat template's own)")
    parser.add_argument(
        "--temperature",
        type=float,
        help="divides the logits; 0 takes the likeliest token (default: 1)",
    )
    parser.add_argument("--max-tokens", type=int, help="longest response (default: 512)")
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(list(argv))
    arguments.overrides.append(f"actor_rollout_ref.model.path={model_folder(arguments.model)}")
    rollout, files = (
        "actor_rollout_ref.rollout",
        json.dumps(arguments.data) if arguments.data else None,
    )
    given = {
        f"{rollout}.temperature": arguments.temperature,
        "data.max_response_length": arguments.max_tokens,
    }
    given |= {f"{rollout}.n": arguments.n, "data.val_files": files}
    arguments.overrides += [f"{key}={value}" for key, value in given.items() if value is not None]
    config = load_from(arguments)
    temperature, limit = (
        config.actor_rollout_ref.rollout.temperature,
        config.data.max_response_length,
    )
    way = (
        f"--temperature {temperature:g}"
        if temperature
        else "the likeliest tokens (--temperature 0)"
    )
    print(f"sampling: {way}, at most {limit} tokens (--max-tokens)", file=sys.stderr)
    if arguments.output is not None and not arguments.prompt and config.data.val_files:
        answer_rows(config, arguments.output)
        return 0
    if arguments.output is not None or not arguments.prompt:
        got = "no --prompt" if not arguments.prompt else "--prompt and --output"
        expected = "--prompt, or --data and --output"
        raise ConfigError("quadriga generate", got=got, expected=expected)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    prompts, images = dealt(arguments.prompt, arguments.image)
    chats = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    for prompt, texts in zip(arguments.prompt, answer(config, chats, images), strict=True):
        print(f"> {prompt}")
        for text in texts:
            print(text)
    return 0


def answer_rows(config: Config, output_path: str | Path) -> None:
    """Write the rows of data.val_files with their responses, and say so; as `answer_files`."""
    log_to(Path(output_path).parent)
    print(f"{answer_files(config, Path(output_path))} rows: {output_path}")


def dealt(prompts: Sequence[str], images: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The prompts with an `<image>` for each image, and the images of each; ConfigError if their numbers differ."""
    texts, rest = list(prompts), list(images)
    if len(texts) == 1 and IMAGE not in texts[0]:
        texts[0] = IMAGE * len(images) + texts[0]
    count = sum(text.count(IMAGE) for text in texts) if images else 0
    if count != len(images):
        got = f"{IMAGE} {count} times in the prompts, and --image {len(images)} times"
        raise ConfigError(
            "--image", got=got, expected="one for each", fix=f"Write {IMAGE} where an image stands."
        )
    return texts, [
        [rest.pop(0) for _ in range(text.count(IMAGE) if images else 0)] for text in texts
    ]


def grade(argv: Sequence[str]) -> int:
    """Answer every prompt of data.val_files with the sampling of rollout.val_kwargs, and print the metrics; of a file
    that has responses, grade these."""
    parser = argparse.ArgumentParser(prog="quadriga eval", description=grade.__doc__)
    parser.add_argument(
        "model", help="a Hugging Face folder or name, a run's directory, one of its global_step_N; or a parquet, json "
        "or jsonl file with responses",
    )  # fmt: skip
    parser.add_argument(
        "--response-key", default="responses", help="of such a file: column of the responses"
    )
    parser.add_argument(
        "--reward-model-key",
        default="reward_model",
        help="of such a file: column of the ground truth",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--data", action="append", default=[], help="a file of prompts, as data.val_files"
    )
    parser.add_argument("--n", type=int, help="responses to each prompt, as rollout.val_kwargs.n")
    arguments = parser.parse_intermixed_args(list(argv))
    if arguments.data:
        arguments.overrides.append(f"data.val_files={json.dumps(arguments.data)}")
    if arguments.n is not None:
        arguments.overrides.append(f"actor_rollout_ref.rollout.val_kwargs.n={arguments.n}")
    if Path(arguments.model).suffix in TABLE_SUFFIXES:
        score(
            load_from(arguments),
            arguments.model,
            arguments.response_key,
            arguments.reward_model_key,
        )
        return 0
    arguments.overrides.append(f"actor_rollout_ref.model.path={model_folder(arguments.model)}")
    config = load_from(arguments)
    grades = evaluate(config)
    for row in first_samples(grades.rows, config.trainer.log_val_generations):
        print(
            f"  {row['input']!r}\n    -> {row['output']!r} (score {row['score']:g}, truth {row['ground_truth']!r})"
        )
    _print(grades)
    return 0


def score(
    config: Config,
    path: str,
    response_key: str = "responses",
    reward_model_key: str = "reward_model",
) -> None:
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
