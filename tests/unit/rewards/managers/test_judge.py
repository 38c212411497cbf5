# SPDX-License-Identifier: Apache-2.0
"""Judges: the limits by a clock of our own, questions to a real server, and batches that a judge grades."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from quadriga.config import Config, RewardModelConfig
from quadriga.errors import ConfigError, RewardError
from quadriga.protocol import DataProto
from quadriga.rewards.managers.judge import Judge, JudgeQuestion, JudgeRewardManager, RateLimit
from tests.http_server import Handler, serving
from tests.limits import SOON_S


class Clock:
    """Time that passes only when somebody waits."""

    now = 0.0

    def __call__(self):
        return self.now

    def wait(self, condition, seconds):
        self.now += seconds


def times(clock, sizes, **limits):
    limit = RateLimit(
        clock=clock, wait=lambda condition, seconds: clock.wait(condition, seconds), **limits
    )
    return [limit.acquire(size, deadline=1e9).sent_at for size in sizes], limit


def test_requests_per_minute():
    assert times(Clock(), [1] * 7, requests_per_minute=3)[0] == [0, 0, 0, 60, 60, 60, 120]


def test_tokens_per_minute():
    assert times(Clock(), [60, 40, 50, 60], tokens_per_minute=100)[0] == [0, 0, 60, 120]


def test_a_request_larger_than_a_minute_goes_alone():
    assert times(Clock(), [10, 500, 10], tokens_per_minute=100)[0] == [0, 60, 120]


def test_no_window_of_a_minute_has_more():
    clock = Clock()
    limit = RateLimit(requests_per_minute=4, clock=clock, wait=clock.wait)
    begun = []
    for pause in (0, 10, 20, 5, 0, 30, 1, 0, 0, 59, 0, 0):
        clock.now += pause
        begun.append(limit.acquire(1, 1e9).sent_at)
    assert all(sum(start <= other < start + 60 for other in begun) <= 4 for start in begun)


def test_what_the_server_has_counted_takes_the_place_of_the_estimate():
    clock = Clock()
    limit = RateLimit(tokens_per_minute=100, clock=clock, wait=clock.wait)
    limit.settle(limit.acquire(90, 1e9), 10)
    assert limit.acquire(90, 1e9).sent_at == 0
    assert limit.acquire(90, 1e9).sent_at == 60


def test_a_limit_that_leaves_no_room_in_time_is_an_error():
    clock = Clock()
    limit = RateLimit(requests_per_minute=1, clock=clock, wait=clock.wait)
    limit.acquire(1, 1e9)
    with pytest.raises(TimeoutError, match="no room in time"):
        limit.acquire(1, deadline=30.0)
    assert clock.now == 30.0


class Chat(Handler):
    """Chat completions: `answer` of the server where it is set; else by the last message.

    It gives 1 to what holds a 5, 0 to what does not, nonsense to what is empty, and refuses what says raise. More than
    `num_free` questions wait for `goes_on`.
    """

    def answer(self, body):
        server, question = self.server, body["messages"][0]["content"]
        with server.lock:
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            server.questions.append(question)
            server.num_inside += 1
            server.most_inside = max(server.most_inside, server.num_inside)
        time.sleep(server.pause_s)
        if len(server.questions) > server.num_free:
            assert server.goes_on.wait(20)
        with server.lock:
            server.num_inside -= 1
        reply = "no idea" if "[]" in question else f"Score: {float('5' in question)}"
        completion = {"choices": [{"message": {"content": reply}}], "usage": {"total_tokens": 7}}
        self.reply(
            400 if "raise" in question else 200,
            completion if server.answer is None else server.answer,
        )


@pytest.fixture
def server():
    counts = {"num_inside": 0, "most_inside": 0, "num_free": 10**6, "pause_s": 0.0}
    state = {
        "lock": threading.Lock(),
        "goes_on": threading.Event(),
        "asked": [],
        "questions": [],
        "answer": None,
    }
    with serving(Chat, "/v1", **counts, **state) as server:
        yield server


def ask(judge, text="x"):
    return judge.ask([{"role": "user", "content": text}])


def test_a_question_and_its_answer(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert (
        ask(Judge(server.url, "m", api_key_env="JUDGE_KEY", max_tokens=9), "good? 5")
        == "Score: 1.0"
    )
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "good? 5"}],
        "max_tokens": 9,
        "temperature": 0.0,
    }
    assert server.asked == [("/v1/chat/completions", "Bearer k", body)]


def test_the_address_may_be_that_of_the_chat_completions(server):
    ask(Judge(f"{server.url}/chat/completions/", "m"))
    assert server.asked[0][0] == "/v1/chat/completions"


def test_a_rate_that_leaves_no_room_is_a_time_out(server):
    judge = Judge(server.url, "m", requests_per_minute=1, timeout_s=0.3)
    ask(judge)
    with pytest.raises(TimeoutError, match="requests or tokens per minute"):
        ask(judge)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"choices": 3}]
)
def test_an_answer_without_text_is_an_error(server, answer):
    server.answer = answer
    with pytest.raises(RewardError, match="expected a chat completion"):
        ask(Judge(server.url, "m"))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 1", 1.0),
        ("It says 'Score: 1000'.\n\nScore: 0.25 \n", 0.25),
        ("Score: 1\nScore: 0", 0.0),
    ],
)
def test_only_a_last_line_of_the_form_is_a_score(reply, score):
    assert JudgeQuestion("x", "{solution_str}").read_score(reply) == score


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("Score: 0. It asked me to write 'Score: 1000000'", "a last line"),
        ("Score: 1\nThat is all.", "a last line"),
        ("it gets Score: 1", "a last line"),
        ("> Score: 1", "a last line"),
        ("Score: 2", "a score from 0 to 1"),
        ("Score: -0.5", "a score from 0 to 1"),
        ("", "a last line"),
    ],
)
def test_other_replies_are_errors(reply, message):
    with pytest.raises(ValueError, match=message):
        JudgeQuestion("x", "{solution_str}").read_score(reply)


def test_a_pattern_reads_one_score_within_its_range():
    question = JudgeQuestion(
        "x", "{solution_str}", r"[Ss]core: (-?\w+)", min_score=-1.0, max_score=10.0
    )
    assert question.read_score("score: 7, again Score: 7") == 7.0
    assert question.fill_in({"solution_str": "x"}) == "x"
    for reply, message in (
        ("score: 0. It asked me to write 'Score: 10'", "expected one"),
        ("score: 11", "from -1 to 10"),
        ("score: nan", "from -1 to 10"),
        ("score: high", "could not convert"),
        ("fine", "expected a match"),
    ):
        with pytest.raises(ValueError, match=message):
            question.read_score(reply)


def test_a_match_without_a_number_is_an_error():
    question = JudgeQuestion("x", "{solution_str}", r"Score:(?: (\d))?")
    with pytest.raises(ValueError, match="with a number as its first group"):
        question.read_score("Score: none")
    assert question.read_score("Score: none? No. Score: 1") == 1.0


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match=r"reward_kwargs\.max_concurrency: got 0"):
        Judge("u", "m", max_concurrency=0)
    with pytest.raises(ConfigError, match=r"reward_kwargs\.timeout_s: got 'x'"):
        Judge("u", "m", timeout_s="x")
    with pytest.raises(ConfigError, match="QUADRIGA_NO_KEY, which is not set"):
        Judge("u", "m", api_key_env="QUADRIGA_NO_KEY")


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


def config(**settings):
    return Config(reward_model=RewardModelConfig(**settings))


@pytest.fixture
def judge(server):
    made = []

    def make(max_error_rate=0.5, **kwargs):
        kwargs = {"url": server.url, "model": "m", "backoff_s": 0.01, **kwargs}
        made.append(
            JudgeRewardManager(config(reward_kwargs=kwargs, max_error_rate=max_error_rate), Words())
        )
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
    assert "expected a last line" in errors[2]
    assert "status 400" in errors[3]
    assert output.extra["judge_score"].tolist() == [1.0, 0.0, None, None]
    assert any(question.startswith("q0 {x}? [print(5)]\n") for question in server.questions)


def test_a_judge_names_the_range_of_its_scores_at_the_start(judge):
    components = {
        "a": {"prompt": "{solution_str}"},
        "b": {"prompt": "{solution_str}", "range": [-1, 10]},
    }
    (notice,) = judge(components=components).notices
    assert "a from 0 to 1, b from -1 to 10" in notice


def test_no_more_at_the_same_time_than_allowed(judge, server):
    server.pause_s = 0.05
    judge(prompt=PROMPT, max_concurrency=3)(batch([0] * 12, "x", ""))
    assert len(server.asked) == 12
    assert 1 < server.most_inside <= 3


def test_named_components_are_weighed_and_logged_apart(judge):
    components = {
        "right": {"prompt": "{solution_str}!", "weight": 2.0},
        "kind": {"prompt": "5 {solution_str}"},
    }
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
    deadline = time.monotonic() + SOON_S
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
        ({"prompt": "how good?"}, r"reward_kwargs\.prompt: .*expected text with \{solution_str\}"),
        (
            {"prompt": "{solution_str}", "pattern": "("},
            r"reward_kwargs\.pattern: .*expected a regular expression",
        ),
        ({"prompt": "{solution_str}", "pattern": "x"}, "a group"),
        ({"prompt": "{solution_str}", "range": [1, 0]}, "expected two numbers"),
        ({"prompt": "{solution_str}", "range": 3}, r"reward_kwargs\.range: got 3"),
        ({"components": {"a": {"prompt": "?"}}}, r"reward_kwargs\.components\.a\.prompt: got"),
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
