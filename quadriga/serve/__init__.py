# SPDX-License-Identifier: Apache-2.0
"""The policy behind an HTTP API of vLLM's shape.

    a client ── HTTP ──> gate ─> app ─> requests ──> engines ── calls ──> CallQueue of each engine
                            <── answers <── completions ──┘   (a thread of the server for each)

The server runs in a thread of its own, so that training goes on beside it.
"""
