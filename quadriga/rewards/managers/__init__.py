# SPDX-License-Identifier: Apache-2.0
"""Reward managers: one file each, registered by name, constructed as `cls(config, tokenizer)`."""
