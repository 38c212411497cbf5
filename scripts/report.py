# SPDX-License-Identifier: Apache-2.0
"""Shows what a run learned: accuracy before and after, three responses before and after, and the curve as a picture.

    .venv/bin/python scripts/report.py outputs/quickstart/largest --title "SmolLM2-135M learns to compare numbers"

Reads what the `jsonl` logger wrote: metrics.jsonl, and samples.jsonl where `trainer.log_val_generations` is not 0.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from curve import plot_curves
from quadriga.errors import QuadrigaError
from quadriga.observe.progress import validation_results
from quadriga.observe.tracking.jsonl import METRICS_FILE, SAMPLES_FILE, read_metrics

NUM_ANSWERS = 3


def accuracies(steps: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Mean validation score of one answer per prompt, over all data sources, for each step that validated."""
    means = {
        step: [
            result.value for result in validation_results(metrics) if result.statistic == "mean@1"
        ]
        for step, metrics in steps.items()
    }
    return {step: sum(values) / len(values) for step, values in means.items() if values}


def responses(path: Path) -> list[str]:
    """The same few prompts at the first and at the last validation, as lines to print."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = sorted({row["step"] for row in rows})
    first, last = (
        {row["input"]: row for row in rows if row["step"] == step} for step in (steps[0], steps[-1])
    )
    lines = []
    for prompt in [prompt for prompt in first if prompt in last][:NUM_ANSWERS]:
        lines.append(f"  {question(prompt)}  (right: {first[prompt]['ground_truth']})")
        for when, row in (("before", first[prompt]), ("after", last[prompt])):
            mark = "+" if row["score"] > 0 else "-"
            lines.append(f"    {when:6} {mark} {' '.join(row['output'].split())}")
    return lines


def question(prompt: str) -> str:
    """The line of a rendered chat that asks."""
    lines = [line for line in prompt.splitlines() if "?" in line]
    return lines[-1] if lines else prompt.strip()


def main() -> int:
    """Print the report and draw the curve."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="of the run")
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--subtitle", default="", help="of the picture: machine, batch, time")
    parser.add_argument(
        "--validation-label", default="", help="what the validation is called in the picture"
    )
    args = parser.parse_args()
    metrics_file = args.directory / METRICS_FILE
    if not metrics_file.exists():
        print(
            f"report: no {metrics_file}; did the run have `jsonl` in trainer.logger?",
            file=sys.stderr,
        )
        return 1
    validated = list(accuracies(read_metrics(metrics_file)).items())
    if validated:
        (_, before), (last, after) = validated[0], validated[-1]
        print(f"  validation accuracy: {before:.3f} before, {after:.3f} after {last} steps")
    for line in responses(args.directory / SAMPLES_FILE):
        print(line)
    picture = args.directory / "curve.png"
    titles = {
        "title": args.title,
        "subtitle": args.subtitle,
        "validation_label": args.validation_label,
    }
    print(f"  curve: {plot_curves(metrics_file, picture, **titles)}\n  logs:  {args.directory}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuadrigaError as error:
        sys.exit(f"report: {error}")
