# SPDX-License-Identifier: Apache-2.0
"""`quadriga replay`: compute a recorded step again in this process, and compare."""

import argparse
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.cli.loading import LazyModule

if TYPE_CHECKING:
    from quadriga.replay import report, run
else:
    # They load torch.
    report = LazyModule("quadriga.replay.report")
    run = LazyModule("quadriga.replay.run")

_ABOUT = """Compute a step of a run again in this process, from the newest checkpoint before it and
the recorded rollouts, and say for each number whether it equals the recorded one. Nothing in the
run's folder changes. The status is 0 if the step is equal, 1 if it is not."""
_PHASES = ("rewards", "advantages", "update")


def main(argv: Sequence[str]) -> int:
    """Run `quadriga replay`; return its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga replay", description=_ABOUT)
    parser.add_argument("run", type=Path, help="a run's directory (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="the step")
    parser.add_argument(
        "--until",
        choices=_PHASES,
        default="",
        help="end after the rewards, which are graded again, after the advantages, or after the "
        "update (default)",
    )
    parser.add_argument(
        "--uid",
        default="",
        metavar="ID",
        help="show rewards and advantages of this prompt, or of the prompt of this rollout",
    )
    parser.add_argument(
        "--pdb",
        action="store_true",
        help="start the debugger at the first difference, or at the phase of --until",
    )
    parser.add_argument(
        "--edit",
        action="append",
        default=[],
        metavar="WHAT",
        help="reward=FILE, loss=NAME or key=value: show what the step would have been; repeatable",
    )
    parser.add_argument("--yes", action="store_true", help="replay for more than 5 minutes")
    options = parser.parse_args(list(argv))
    until = options.until
    # What --uid shows is known once there are advantages.
    if options.uid and not until:
        until = "advantages"
    request = run.ReplayRequest(
        directory=options.run,
        step=options.step,
        until=until,
        debugs=options.pdb,
        uid=options.uid,
        edits=options.edit,
        is_confirmed=options.yes,
    )
    try:
        replayed = run.replay(request)
    except BdbQuit:
        print("the replay was ended in the debugger")
        return 1
    for line in report.describe_replay(replayed, options.uid):
        print(line)
    return 0 if replayed.is_equal else 1
