# SPDX-License-Identifier: Apache-2.0
"""The managers for slow graders and for judges elsewhere, on batches."""

import asyncio
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from quadriga.config import Config, CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from quadriga.errors import ConfigError, RewardError
from quadriga.protocol import DataProto
from quadriga.rewards.managers.judge import JudgeRewardManager
from quadriga.rewards.managers.prime import PrimeRewardManager

TEXTS = ["print(5)", "print(6)", "", "raise"]


class Words:
    """A tokenizer whose token ids are places in TEXTS; the id 99 pads."""

    def batch_decode(self, token_ids, skip_special_tokens):
        return [" ".join(TEXTS[token] for token in row if token < len(TEXTS)) for row in token_ids]


def batch(rows, source, truth):
    responses = torch.full((len(rows), 2), 99)
    responses[:, 0] = torch.tensor(rows)
    non_tensors = {
        "data_source": np.array([source] * len(rows), dtype=object),
        "reward_model": np.array([{"ground_truth": truth}] * len(rows), dtype=object),
        "extra_info": np.array([{"question": f"q{row}"} for row in rows], dtype=object),
    }
    mask = torch.tensor([[1, 1, 0]] * len(rows))
    return DataProto.from_dict({"responses": responses, "attention_mask": mask}, non_tensors)


def config(path=None, **settings):
    custom = CustomRewardFunctionConfig(path=str(path)) if path else CustomRewardFunctionConfig()
    return Config(reward_model=RewardModelConfig(**settings), custom_reward_function=custom, data=DataConfig())


def test_prime_runs_programs_and_adds_acc():
    manager = PrimeRewardManager(config(timeout_s=60.0), Words())
    try:
        output = manager(batch([0, 1, 2], "apps", '{"inputs": [""], "outputs": ["5"]}'))
    finally:
        manager.close()
    assert output.scores.sum(dim=1).tolist() == [1.0, 0.0, 0.0]
    assert output.extra["acc"].tolist() == [1.0, 0.0, 0.0]
    assert output.extra["reason"].tolist()[0] == ""
    assert "wrong answer" in output.extra["reason"][1]
    assert output.metrics["reward/extra/pass_rate"].value == pytest.approx(1 / 3)


def test_prime_grades_side_by_side_and_keeps_its_own_time_limit(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, time\n"
        "def compute_score(solution_str, **kwargs):\n"
        "    time.sleep(60 if solution_str == 'raise' else 0.3)\n"
        "    return {'score': 1, 'process': os.getpid()}\n"
    )
    kwargs = {"num_processes": 3, "timeout_s": 2.0}
    manager = PrimeRewardManager(config(path=path, reward_kwargs=kwargs, timeout_s=999.0), Words())
    try:
        output = manager(batch([0, 0, 0, 0, 0, 0, 3], "x", None))
    finally:
        manager.close()
    assert output.metrics["reward/timeouts"].value == 1
    assert output.extra["acc"].tolist() == [1.0] * 6 + [None]
    assert len(set(output.extra["process"][:6])) > 1
    assert os.getpid() not in output.extra["process"]


@pytest.mark.parametrize("kwargs", [{"num_processes": 0}, {"timeout_s": -1}, {"num_workers": 3}])
def test_prime_checks_its_options(kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        PrimeRewardManager(config(reward_kwargs=kwargs), Words())


class Critic(BaseHTTPRequestHandler):
    """Gives 1 to what holds a 5, 0 to what does not, nonsense to what is empty, and refuses what says raise.

    More than `num_free` questions wait for `goes_on`.
    """

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        self.server.questions.append(question)
        if len(self.server.questions) > self.server.num_free:
            assert self.server.goes_on.wait(20)
        answer = "no idea" if question.endswith("[]") else f"Score: {float('5' in question)}"
        text = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
        self.send_response(400 if "raise" in question else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Critic)
    server.questions, server.num_free, server.goes_on = [], 10**6, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def judge(server):
    made = []

    def make(max_error_rate=0.5, **kwargs):
        kwargs = {"url": server.url, "model": "m", "backoff_s": 0.01, **kwargs}
        made.append(JudgeRewardManager(config(reward_kwargs=kwargs, max_error_rate=max_error_rate), Words()))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


PROMPT = "{extra_info.question} {ground_truth}? [{solution_str}]"


def test_a_judge_grades_and_says_what_it_could_not_grade(judge, server):
    output = judge(prompt=PROMPT)(batch([0, 1, 2, 3], "anything", "{x}"))
    assert output.scores.sum(dim=1).tolist() == [1.0, 0.0, 0.0, 0.0]
    errors = output.extra["reward_error"]
    assert errors[0] == errors[1] == ""
    assert "expected a match" in errors[2]
    assert "status 400" in errors[3]
    assert output.extra["judge_score"].tolist() == [1.0, 0.0, None, None]
    assert "q0 {x}? [print(5)]" in server.questions


def test_named_components_are_weighed_and_logged_apart(judge):
    components = {"right": {"prompt": "{solution_str}!", "weight": 2.0}, "kind": {"prompt": "5 {solution_str}"}}
    output = judge(components=components)(batch([0, 1], "x", None))
    assert output.scores.sum(dim=1).tolist() == [3.0, 1.0]
    assert output.metrics["reward/extra/right"].value == 0.5
    assert output.metrics["reward/extra/kind"].value == 1.0


def test_too_many_failures_stop_the_asking(judge, server):
    server.num_free = 1
    with pytest.raises(RewardError, match="could not be graded"):
        judge(prompt=PROMPT, max_concurrency=1, max_error_rate=0.0)(batch([3] * 50, "x", ""))
    server.goes_on.set()
    time.sleep(0.1)
    assert 1 <= len(server.questions) <= 2  # the second one may have been on its way


def test_a_judge_is_asked_meanwhile_and_no_more_once_it_is_cancelled(judge, server):
    manager = judge(prompt=PROMPT, max_concurrency=1)
    data = batch([0, 1, 2], "x", "{x}")
    grading = manager.begin(data)
    deadline = time.monotonic() + 20
    while len(server.questions) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert grading.result().scores.tolist() == manager(data).scores.tolist()
    server.num_free = num_asked = len(server.questions)
    manager.begin(batch([0] * 200, "x", "{x}")).cancel()
    server.goes_on.set()
    time.sleep(0.1)
    assert len(server.questions) <= num_asked + 1


def test_one_sample_alone(judge):
    manager = judge(prompt="{solution_str}")
    row = {"data_source": "x", "solution_str": "5", "ground_truth": None, "extra_info": {}}
    outcome = asyncio.run(manager.grade_one(row))
    assert (outcome.score, outcome.error) == (1.0, "")
    data = batch([0], "x", None)
    assert manager.begin(data, [outcome]).result().scores.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "got neither of prompt and components"),
        ({"prompt": "{solution_str}", "components": {"a": {}}}, "got both"),
        ({"prompt": "how good?"}, r"expected text with \{solution_str\}"),
        ({"prompt": "{solution_str}", "pattern": "("}, "expected a regular expression"),
        ({"prompt": "{solution_str}", "pattern": "x"}, "a group"),
        ({"components": {"a": {"text": 3}}}, "components.a"),
        ({"prompt": "{solution_str}", "rpm": 3}, "rpm"),
        ({"prompt": "{solution_str}", "requests_per_minute": 0}, "requests_per_minute"),
    ],
)
def test_options_that_do_not_fit(judge, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        judge(**kwargs)


def test_url_and_model_are_needed():
    with pytest.raises(ConfigError, match="no url and no model"):
        JudgeRewardManager(config(reward_kwargs={"prompt": "{solution_str}"}), Words())
