# SPDX-License-Identifier: Apache-2.0
"""Predictions made before a run: how much memory and time its phases take."""
