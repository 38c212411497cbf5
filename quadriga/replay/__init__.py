# SPDX-License-Identifier: Apache-2.0
"""Replay of a recorded step in this process, with the trainer's own code.

    start.py      where a replay starts: checkpoint, steps between, configuration, predicted time
    batch.py      the batch of a step from its record, in the place of generation and grading
    trainer.py    the trainer and the policy worker of a replay
    run.py        a replay from its request to its comparison
    compare.py    the recorded and the replayed numbers of a step
    report.py     the comparison as text

It reads the run's directory and writes into a temporary folder alone.
"""
