# SPDX-License-Identifier: Apache-2.0
"""`quadriga eval`: grade a model, a run or a checkpoint on validation data."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.trainer.checkpoint import model_folder
from quadriga.trainer.evaluate import evaluate


def main(argv: Sequence[str]) -> int:
    """Answer every prompt of data.val_files with the sampling of rollout.val_kwargs, and print the metrics."""
    parser = argparse.ArgumentParser(prog="quadriga eval", description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder or name, a run's directory, or one of its global_step_N")
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(list(argv))
    arguments.overrides.append(f"actor_rollout_ref.model.path={model_folder(arguments.model)}")
    config = load_from(arguments)
    metrics, rows = evaluate(config)
    for row in rows:
        print(f"  {row['input']!r}\n    -> {row['output']!r} (score {row['score']:g}, truth {row['ground_truth']!r})")
    width = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.4f}")
    return 0
