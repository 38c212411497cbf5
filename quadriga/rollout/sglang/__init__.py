# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine, in its own process or at a server. Only `host` imports SGLang."""
