# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training: generation continues while the policy is trained (`async_training`)."""
