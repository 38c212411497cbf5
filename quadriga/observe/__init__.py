# SPDX-License-Identifier: Apache-2.0
"""Reports of a run about itself: metrics, timings, progress, tracking, profiles, the machine.

Nothing is imported here, so that a grading process can import `metrics` without torch or rich.
"""
