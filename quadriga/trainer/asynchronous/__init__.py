# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training: generation continues while the policy is trained (`async_training`).

To understand how staleness is bounded, read in this order:

    rules        settings of a run, versions of the weights, and the kinds of decisions
    schedule     turns events into decisions; the gate that bounds staleness
    batches      threads: passes events to the schedule, and carries out its decisions
    prefetcher   groups of responses, from their prompts to a training step
    streams      engines in this process or in others, and the weights that they load
    snapshot     state of all this in a checkpoint
    staleness    checks the bound on the tokens of each batch

In addition, `record` repeats the schedule of an earlier run, and `simulation` predicts how much
faster asynchronous training would be.
"""
