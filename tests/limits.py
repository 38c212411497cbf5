# SPDX-License-Identifier: Apache-2.0
"""Time limits of the tests, in seconds: only a fault reaches one.

Each is at least ten times what an idle machine with two fast cores needs, since others have a third of its speed and
share their cores. A limit that a test expects to run out stands in that test. `scripts/test` ends a test after
`TEST_S`, so a limit inside a test is shorter.
"""

TEST_S = 600
"""One test; `--timeout` of scripts/test. The slowest take some 40 s."""

SOON_S = 60.0
"""A wait for a thread, a signal or a process that ends, which takes milliseconds."""

GRADED_S = 60.0
"""`timeout_s` of samples that are graded in microseconds; the start of a grading process counts in it."""

PROGRAM_S = 500.0
"""A program that a test runs and waits for: at most 30 s, for kernels that Triton's interpreter computes."""

HANGS_S = 3600.0
"""How long what hangs would take: longer than `TEST_S`, so that a test that waits for it fails."""

# ---- tests/numerics and tests/megatron ----------------------------------------------------------

RANKS_S = TEST_S - 60
"""All ranks of one program of `run_ranks`: at most 40 s, for the layouts on Megatron-core."""

PEER_S = RANKS_S - 40
"""How long a rank waits for another one of its program: shorter than `RANKS_S`, so that the rank names what it waited
for."""

# ---- tests/e2e ----------------------------------------------------------------------------------

COMMAND_S = 300.0
"""A command comes to the step that is waited for, or to its end: 30 s at most, on a cluster of its own."""
NOTEBOOK_S = 300.0
"""A cell of the notebook, which trains: 20 s."""
PROCESS_ENDS_S = 60.0
"""A process has ended once it was told to, or once the one that started it has: 2 s."""
PASSES_BEGIN_S = 60.0
"""Passes of models in several processes have all begun, or a grader has, once a step has its responses: 1 s."""
ENGINE_RESTARTS_S = 240.0
"""A rollout engine is started again in a new process: 15 s."""
NODES_LOST_S = 300.0
"""The driver of a cluster of two nodes that loses one, then its head: 30 s, most of it Ray's waiting."""
RUN_LOSES_A_NODE_S = 500.0
"""A run on two nodes that loses one, with a pause of 3 s in each step: 45 s."""
