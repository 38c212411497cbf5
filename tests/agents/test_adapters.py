# SPDX-License-Identifier: Apache-2.0
"""Adapters of Gymnasium, SkyRL Gym, OpenEnv's wire format and games for two."""

import http.server
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quadriga.errors import RolloutError
from quadriga.rollout.environments.interface import EnvironmentSpec
from quadriga.rollout.environments.libraries import (
    GymnasiumEnvironment,
    SkyRLEnvironment,
    TextArenaEnvironment,
)
from quadriga.rollout.environments.openenv import OpenEnvEnvironment

# Without it the tests are skipped, as the folder's other tests are.
server_of_sockets = pytest.importorskip("websockets.sync.server")

SCHEMA = {"properties": {"x": {"type": "integer"}, "metadata": {}}, "required": ["x"]}


def test_typed_actions_are_json_checked_against_the_space() -> None:
    environment = GymnasiumEnvironment(EnvironmentSpec("gymnasium:CartPole-v1"), "CartPole-v1")
    first = environment.reset(7, {})
    assert '"minimum": 0, "maximum": 1' in first.text
    assert environment.reset(7, {}).text == first.text
    for reply in ("left", "2", "true", "[1]", "1.5"):
        step = environment.step(reply)
        assert step.info == {"is_invalid": True}
        assert step.text.startswith("Error: got")
    step = environment.step("```json\n1\n```")
    assert step.rewards == {0: 1.0}
    assert len(json.loads(step.text)) == 4
    action = environment.sample_action(step.text, random.Random(0))
    assert action in ("0", "1")
    with_module = "gymnasium.envs:CartPole-v1"
    assert GymnasiumEnvironment(EnvironmentSpec(f"gymnasium:{with_module}"), with_module).reset(
        7, {}
    )


def test_a_row_of_a_file_reaches_skyrl_gym() -> None:
    row = {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"ground_truth": "2"},
    }
    environment = SkyRLEnvironment(EnvironmentSpec("skyrl_gym:gsm8k"), "gsm8k")
    with pytest.raises(RolloutError, match="expected a row of a data file"):
        environment.reset(1, {})
    assert environment.reset(1, row).text == ""
    step = environment.step("It is 2.\n#### 2")
    assert step.is_done
    assert step.rewards == {0: 1.0}


def test_an_agent_reads_what_it_has_not_read() -> None:
    spec = EnvironmentSpec("textarena:TicTacToe-v0", num_agents=2)
    environment = TextArenaEnvironment(spec, "TicTacToe-v0")
    step = environment.reset(3, {})
    texts = {0: [step.text], 1: []}
    for move in ("[4]", "[0]", "[3]", "[1]", "[5]"):
        agent = step.agent
        step = environment.step(move)
        if not step.is_done:
            assert step.agent != agent
            texts[step.agent].append(step.text)
    assert step.is_done
    assert step.rewards == {0: 1.0, 1: -1.0}
    assert step.info["wins"] == [0]
    assert "You are Player 0" in texts[0][0]
    assert "You are Player 0" not in texts[0][1]


def test_another_number_of_agents_is_refused_by_the_game() -> None:
    environment = TextArenaEnvironment(EnvironmentSpec("textarena:TicTacToe-v0"), "TicTacToe-v0")
    with pytest.raises(RolloutError, match=r"has to be 2, received 1.*Set env.agents to a list"):
        environment.reset(3, {})


class _Schema(http.server.BaseHTTPRequestHandler):
    location = ""  # of a redirect

    def do_GET(self) -> None:
        if self.location:
            self.send_response(307)
            self.send_header("Location", self.location)
            self.end_headers()
            return
        body = json.dumps({"action": SCHEMA}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def http_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server that redirects every request."""
    monkeypatch.setattr(_Schema, "location", "http://127.0.0.1:9/schema")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_redirect_is_refused_with_a_sentence(http_port: int) -> None:
    url = f"ws://127.0.0.1:{http_port}"
    with pytest.raises(RolloutError, match=r"got status 307.*Redirects are not followed"):
        OpenEnvEnvironment(EnvironmentSpec(f"openenv:{url}"), url)


_num_refused = 0


def _session(connection: Any) -> None:
    global _num_refused
    for text in connection:
        message = json.loads(text)
        if _num_refused == 0:
            # The session of another episode has not ended yet.
            _num_refused = 1
            error = {"code": "CAPACITY_REACHED", "message": "1 of 1 sessions"}
            connection.send(json.dumps({"type": "error", "data": error}))
            return
        observation = {"said": message["data"], "reward": 1, "done": True, "metadata": {}}
        reply = {"observation": observation, "reward": 0.5, "done": message["type"] == "step"}
        answer = {"type": "observation", "data": reply}
        if message["data"].get("x") == 0:
            answer = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no 0"}}
        if "seed" in message["data"]:
            answer = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no seed"}}
        if message["data"].get("x") == 1:
            answer = {"type": "observation", "data": {"reward": 1}}
        connection.send("<html>" if message["data"].get("x") == 2 else json.dumps(answer))


def _answer_schema(connection: Any, request: Any) -> Any:
    if request.path == "/schema":
        return connection.respond(200, json.dumps({"action": SCHEMA}))
    return None


def test_a_session_of_openenv() -> None:
    serve = server_of_sockets.serve
    with serve(_session, "127.0.0.1", 0, process_request=_answer_schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        environment = OpenEnvEnvironment(EnvironmentSpec(f"openenv:{url}"), url)
        first = environment.reset(5, {})
        assert first.text.startswith('{"said": {}}\nReply with JSON that fits the schema')
        assert environment.step("[]").info == {"is_invalid": True}
        assert environment.step('{"x": 0}').text == "Error: no 0"
        step = environment.step('{"x": 4}')
        assert (step.text, step.rewards, step.is_done) == ('{"said": {"x": 4}}', {0: 0.5}, True)
        with pytest.raises(RolloutError, match="without an observation"):
            environment.step('{"x": 1}')
        with pytest.raises(RolloutError, match="<html>', which is no JSON"):
            environment.step('{"x": 2}')
        assert isinstance(json.loads(environment.sample_action("", random.Random(0)))["x"], int)
        environment.discard()
        server.shutdown()
