# SPDX-License-Identifier: Apache-2.0
"""What a model is to us: loading, attention over packed tokens, heads, and its cost in floating-point operations."""

import os

# On CPUs torch and oneDNN each keep a compiled kernel and its scratch memory for the last 1024 shapes that they met.
# Packed batches hardly ever have the same number of tokens twice, so that would be a gigabyte of kernels for nothing.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
