# SPDX-License-Identifier: Apache-2.0
"""Columns with the times of responses, in a batch and in the record of its step.

They have a module without torch, for commands that only read records.
"""

TIMES = "rollout_times"
"""Column [B, 3] float64: when the engine got, admitted and finished each response."""
GRADED_AT = "graded_at"
"""Column [B] float64: when the grade of each response arrived, in seconds since 1970."""
TIME_COLUMNS = ("queued_at", "admitted_at", "generated_at", GRADED_AT)
"""Columns of a recorded step that hold the columns of `TIMES`, and `GRADED_AT`."""
