# SPDX-License-Identifier: Apache-2.0
"""What several ranks do for one model: each file is one way to share the work, and needs no other."""
