# SPDX-License-Identifier: Apache-2.0
"""What a person reads: steps only where no progress shows them, validation with its change, whole samples."""

from io import StringIO

from rich.console import Console

from quadriga.observe.progress import Progress
from quadriga.observe.tracking import SHOWN_CHARACTERS, ConsoleBackend

METRICS = {"critic/rewards/mean": 0.5, "perf/throughput": 1214.0}


def test_steps_are_printed_and_aligned_without_a_progress(capsys):
    backend = ConsoleBackend()
    backend.log(METRICS, 9)
    backend.log(METRICS, 10)
    backend.log({"internal/detail": 1.0}, 11)
    assert capsys.readouterr().out.splitlines() == [
        "step 9  reward 0.500  1 214 tok/s",
        "step 10  reward 0.500  1 214 tok/s",
    ]


def test_steps_are_left_to_the_progress_and_validation_goes_through_it():
    screen = StringIO()
    progress = Progress(10, console=Console(file=screen, force_terminal=False))
    backend = ConsoleBackend(progress)
    backend.log({**METRICS, "val-core/a/reward/mean@1": 0.25}, 1)
    assert screen.getvalue() == "validation at step 1\n  a  reward mean@1 0.250\n"


def test_a_validation_shows_its_change_and_sources_stand_in_line(capsys):
    backend = ConsoleBackend()
    backend.log(
        {"val-core/quadriga/largest/reward/mean@1": 0.365, "val-core/gsm8k/reward/mean@1": 0.5}, 0
    )
    backend.log(
        {"val-core/quadriga/largest/reward/mean@1": 0.61, "val-core/gsm8k/reward/mean@1": 0.4}, 15
    )
    assert capsys.readouterr().out.splitlines() == [
        "validation at step 0",
        "  quadriga/largest  reward mean@1 0.365",
        "  gsm8k             reward mean@1 0.500",
        "validation at step 15",
        "  quadriga/largest  reward mean@1 0.610 (+0.245 since step 0)",
        "  gsm8k             reward mean@1 0.400 (-0.100 since step 0)",
    ]


def test_samples_are_paragraphs_and_a_long_response_says_how_much_is_missing(samples, capsys):
    samples[1]["output"] = "a" * SHOWN_CHARACTERS + "b" * SHOWN_CHARACTERS
    ConsoleBackend().log_samples(samples, 3)
    shown = capsys.readouterr().out
    assert shown.splitlines()[:7] == [
        "samples at step 3",
        "  1 of 2",
        "    input         Which is | the",
        "                  largest?",
        "    output        82",
        "    score         1.000",
        "    step in game  [1, 2]",
    ]
    half = SHOWN_CHARACTERS // 2
    assert f"{'a' * half} ... ({SHOWN_CHARACTERS} characters) ... {'b' * half}" in shown
