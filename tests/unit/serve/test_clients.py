# SPDX-License-Identifier: Apache-2.0
"""Clients that others wrote, in an environment of their own (`scripts/install-clients`), call the server unchanged."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import PROGRAM_S
from tests.unit.serve.conftest import Halves, Served

PYTHON = Path(__file__).parents[3] / ".venv-clients/bin/python"
PROGRAM = Path(__file__).parent / "foreign.py"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.skipif(
    not PYTHON.exists(),
    reason="clients of others did not run: scripts/install-clients makes .venv-clients",
)
@pytest.mark.parametrize("client", ["renderers", "openai", "gateway"])
def test_foreign_clients_accept_every_answer(serve: Callable[..., Served], client: str) -> None:
    """A thousand answers to renderers' client; OpenAI's package with tools, streams and errors; rLLM's gateway."""
    engine = Halves(CALL if client == "openai" else "hi")
    served = serve(engine, "" if client == "gateway" else "sesame")
    command = [str(PYTHON), str(PROGRAM), client, served.server.url]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S)
    assert process.returncode == 0, process.stderr[-3000:]
