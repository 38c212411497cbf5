# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training: generation continues while the policy is trained (`async_training`).

To understand how staleness is bounded, read in this order:

    rules        settings of a run, versions of the weights, and the decisions that there are
    schedule     which decisions follow from which events; the gate that bounds staleness
    batches      threads: events go to the schedule, its decisions to the other parts
    prefetcher   groups of responses from their prompts to a step
    streams      engines, in this process or in others, and the weights that they load
    snapshot     what a checkpoint has of all this
    staleness    the check of the bound on the tokens of each batch

Apart from that, `record` repeats the schedule of an earlier run, and `simulation` predicts what
asynchronous training is worth.
"""
