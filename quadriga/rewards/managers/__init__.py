# SPDX-License-Identifier: Apache-2.0
"""Reward managers: registered by name, constructed as `cls(config, tokenizer)`."""
