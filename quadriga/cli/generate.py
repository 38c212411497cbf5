# SPDX-License-Identifier: Apache-2.0
"""`quadriga generate` and `eval`: generate responses to prompts, and grade them."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.cli.loading import LazyModule
from quadriga.config import Config
from quadriga.config.rollout import ROLLOUT
from quadriga.data.files import TABLE_SUFFIXES
from quadriga.errors import ConfigError
from quadriga.protocol.chats import IMAGE
from quadriga.streams import log_to
from quadriga.trainer.checkpoint import model_folder

if TYPE_CHECKING:
    from quadriga.trainer import evaluate, validate
else:
    # They load torch, which neither a help text nor a wrong command line needs.
    evaluate = LazyModule("quadriga.trainer.evaluate")
    validate = LazyModule("quadriga.trainer.validate")


def main(argv: Sequence[str]) -> int:
    """Print responses to prompts, or with --output write responses to the rows of --data."""
    arguments = _make_parser().parse_intermixed_args(list(argv))
    config = _load_config(arguments)
    temperature = config.actor_rollout_ref.rollout.temperature
    sampling = "the most likely tokens (--temperature 0)"
    if temperature:
        sampling = f"--temperature {temperature:g}"
    print(f"sampling: {sampling}", file=sys.stderr)
    # There are two uses: --data with --output, or --prompt alone. `val_files` may be in a --config file.
    if arguments.output is not None and not arguments.prompt and config.data.val_files:
        answer_rows(config, arguments.output)
        return 0
    if arguments.output is not None or not arguments.prompt:
        got = "no --prompt" if not arguments.prompt else "--prompt and --output"
        raise ConfigError("quadriga generate", got=got, expected="--prompt, or --data and --output")
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    prompts, images = distribute_images(arguments.prompt, arguments.image)
    chats = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    answers = evaluate.answer(config, chats, images)
    for prompt, texts in zip(arguments.prompt, answers, strict=True):
        print(f"> {prompt}", *texts, sep="\n")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of `quadriga generate`."""
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
        "--output",
        type=Path,
        help="a parquet file to write: the rows of --data and a column `responses`. The same call "
        "resumes after an interruption",
    )
    parser.add_argument("--n", type=int, help="responses to each prompt, as rollout.n")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        help="a file for an <image> in the prompts, in their order; may be repeated. A single "
        "prompt without <image> gets its images in front",
    )
    parser.add_argument("--system", help="a system message (default: the chat template's own)")
    parser.add_argument(
        "--temperature",
        type=float,
        help="divides the logits; 0 takes the most likely token (default: 1)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="longest response (default: 512, or what fits behind the longest prompt)",
    )
    add_config_arguments(parser)
    return parser


def _load_config(arguments: argparse.Namespace) -> Config:
    """Load the configuration, with the keys that options of the command set."""
    settings = {
        "actor_rollout_ref.model.path": model_folder(arguments.model),
        f"{ROLLOUT}.temperature": arguments.temperature,
        "data.max_response_length": arguments.max_tokens,
        f"{ROLLOUT}.n": arguments.n,
        "data.val_files": json.dumps(arguments.data) if arguments.data else None,
    }
    return load_from(arguments, settings)


def answer_rows(config: Config, output_path: str | Path) -> None:
    """Write the rows of data.val_files with their responses to a file, and print the number of rows."""
    log_to(Path(output_path).parent)
    num_rows = evaluate.answer_files(config, Path(output_path))
    print(f"{num_rows} rows: {output_path}")


def distribute_images(
    prompts: Sequence[str], images: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Distribute images over the `<image>` places of prompts.

    Args:
        prompts: the prompts. A single prompt without `<image>` gets all images in front.
        images: the images, in the order of their places.

    Returns:
        The prompts with an `<image>` for each image, and the images of each prompt.

    Raises:
        ConfigError: there are more or fewer images than places.
    """
    texts = list(prompts)
    if not images:
        # Without images, `<image>` is plain text.
        return texts, [[] for _ in texts]
    if len(texts) == 1 and IMAGE not in texts[0]:
        texts[0] = IMAGE * len(images) + texts[0]
    num_places = sum(text.count(IMAGE) for text in texts)
    if num_places != len(images):
        raise ConfigError(
            "--image",
            got=f"{IMAGE} {num_places} times in the prompts, and --image {len(images)} times",
            expected="one for each",
            fix=f"Write {IMAGE} in the prompts once for each --image.",
        )
    # Each prompt takes the next images, as many as it has places.
    remaining_images = iter(images)
    return texts, [list(islice(remaining_images, text.count(IMAGE))) for text in texts]


def grade(argv: Sequence[str]) -> int:
    """Generate responses to all prompts of data.val_files with the sampling of rollout.val_kwargs,
    grade them and print the metrics; or grade the responses in a file."""
    parser = argparse.ArgumentParser(prog="quadriga eval", description=grade.__doc__)
    parser.add_argument(
        "model",
        help="a Hugging Face folder or name, a run's directory, one of its global_step_N; or a "
        "parquet, json or jsonl file with responses",
    )
    parser.add_argument(
        "--response-key", default="responses", help="for such a file: column of the responses"
    )
    parser.add_argument(
        "--reward-model-key",
        default="reward_model",
        help="for such a file: column of the ground truth",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--data", action="append", default=[], help="a file of prompts, as data.val_files"
    )
    parser.add_argument("--n", type=int, help="responses to each prompt, as rollout.val_kwargs.n")
    arguments = parser.parse_intermixed_args(list(argv))
    is_file = Path(arguments.model).suffix in TABLE_SUFFIXES
    settings = {
        "data.val_files": json.dumps(arguments.data) if arguments.data else None,
        f"{ROLLOUT}.val_kwargs.n": arguments.n,
        "actor_rollout_ref.model.path": None if is_file else model_folder(arguments.model),
    }
    config = load_from(arguments, settings)
    if is_file:
        score(config, arguments.model, arguments.response_key, arguments.reward_model_key)
        return 0
    grades = evaluate.evaluate(config)
    for row in validate.first_samples(grades.rows, config.trainer.log_val_generations):
        grading = f"score {row['score']:g}, truth {row['ground_truth']!r}"
        print(f"  {row['input']!r}\n    -> {row['output']!r} ({grading})")
    _print_grades(grades)
    return 0


def score(
    config: Config,
    path: str,
    response_key: str = "responses",
    reward_model_key: str = "reward_model",
) -> None:
    """Grade the responses in a file with `score_file`, and print the metrics."""
    _print_grades(evaluate.score_file(config, path, response_key, reward_model_key))


def _print_grades(grades: "evaluate.Grades") -> None:
    """Print each metric with its 95 % confidence interval, if it has one.

    If all scores are 0 or 1, metrics that are also known as pass@k are marked.
    """
    is_binary = all(row["score"] in (0, 1) for row in grades.rows)
    width = max(map(len, grades.metrics), default=0)
    for name, value in grades.metrics.items():
        line = f"{name:<{width}}  {value:.4f}"
        if name in grades.intervals:
            # Scores of a single prompt that may be outside [0, 1] have an infinite interval.
            low, high = grades.intervals[name]
            line += f"  [{low:.4f}, {high:.4f}]" if math.isfinite(low) else "  [of one prompt]"
        best = re.search(r"/reward/best@(\d+)/mean$", name)
        if is_binary and best:
            # For scores of 0 or 1, the mean of the best of k is pass@k.
            line += f"  pass@{best[1]}"
        print(line)
