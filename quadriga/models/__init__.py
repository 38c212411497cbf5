# SPDX-License-Identifier: Apache-2.0
"""What a model is to us: loading, attention over packed tokens, heads, and its cost in floating-point operations."""
