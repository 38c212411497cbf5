# SPDX-License-Identifier: Apache-2.0
"""Replay of a recorded step in this process, with the trainer's own code.

    start.py      where a replay starts: checkpoint, steps to train again, configuration
    batch.py      the batch of a step from its record, instead of generation and grading
    trainer.py    the trainer and the policy worker of a replay
    run.py        a replay, from its request to its result
    compare.py    comparison of the recorded and the replayed numbers of a step
    report.py     the result as text

A replay only reads the run's directory. It writes into a temporary folder.
"""
