# SPDX-License-Identifier: Apache-2.0
"""HTTP server for the policy, with the routes and fields of vLLM's API.

    a client ── HTTP ──> gate ─> app ─> requests ──> engines ── calls ──> CallQueue of each engine
                            <── answers <── completions ──┘   (a thread of the server for each)

The server runs in its own thread, so that training goes on at the same time.
"""
