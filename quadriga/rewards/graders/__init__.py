# SPDX-License-Identifier: Apache-2.0
"""Graders: one file each, with a function `compute_score`.

`compute_score(solution_str, ground_truth, extra_info=None, **options)` returns a dict with the
reward as "score" and the answer that it found in the response as "pred" (text for majority voting;
None if there is none). A response without a readable answer is wrong and scores 0. A ground truth
that cannot be read is a mistake in the data and raises an error. No grader loads torch.
"""
