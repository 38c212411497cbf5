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

PROGRAM_S = 300.0
"""A program that imports torch and the package: 3 s with a model's modules, 10 s on a slow machine."""

HANGS_S = 3600.0
"""How long what hangs would take: longer than `TEST_S`, so that a test that waits for it fails."""
