# SPDX-License-Identifier: Apache-2.0
"""Language models for training: loading, attention over packed tokens, heads, and FLOP counts."""

import os

# On a CPU, torch and oneDNN each cache compiled kernels, with their scratch memory, for the last
# 1024 shapes. Packed batches hardly ever repeat a number of tokens, so these caches would fill a
# gigabyte with kernels that are never used again.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
