# SPDX-License-Identifier: Apache-2.0
"""The training engine on plain torch. On one rank it uses no process group and shards nothing."""
