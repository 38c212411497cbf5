# SPDX-License-Identifier: Apache-2.0
"""Ways to spread one model over several ranks: one file for each, independent of the others."""
