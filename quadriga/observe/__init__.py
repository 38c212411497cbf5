# SPDX-License-Identifier: Apache-2.0
"""What a run reports about itself: metrics, timings, progress, tracking, profiles, the machine.

Nothing is imported here: a grading process that needs `metrics` does not pay for torch or rich.
"""
