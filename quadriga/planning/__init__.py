# SPDX-License-Identifier: Apache-2.0
"""Predictions made before a run: how much memory its phases take."""
