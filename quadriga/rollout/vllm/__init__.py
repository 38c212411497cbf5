# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine, in this process or in its own. Only `library` imports vLLM."""
