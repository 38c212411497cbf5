# SPDX-License-Identifier: Apache-2.0
"""`quadriga show`: what a run has done so far, as plain text."""

import argparse
from collections.abc import Sequence

from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.run_report import report

_ABOUT = """Show what a run has done, whether it has ended or goes on: the reward over steps, where
the time went, and the best and worst responses of a step with the parts of their reward. Nothing is
loaded or changed."""


def main(argv: Sequence[str]) -> int:
    """Run `quadriga show`; return its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga show", description=_ABOUT)
    parser.add_argument("run", help="a run's directory (trainer.default_local_dir)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="step of the responses; default: the newest"
    )
    options = parser.parse_args(list(argv))
    for line in report(RunFolder(options.run), options.step):
        print(line)
    return 0
