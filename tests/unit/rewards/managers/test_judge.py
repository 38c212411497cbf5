# SPDX-License-Identifier: Apache-2.0
"""Judges: the limits by a clock of our own, and questions to a real server."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards.managers.judge import Judge, JudgeSettings, RateLimit, read_score


class Clock:
    """Time that passes only when somebody waits."""

    now = 0.0

    def __call__(self):
        return self.now

    def wait(self, condition, seconds):
        self.now += seconds


def times(clock, sizes, **limits):
    limit = RateLimit(clock=clock, wait=lambda condition, seconds: clock.wait(condition, seconds), **limits)
    return [limit.acquire(size, deadline=1e9)[0] for size in sizes], limit


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
        begun.append(limit.acquire(1, 1e9)[0])
    assert all(sum(start <= other < start + 60 for other in begun) <= 4 for start in begun)


def test_what_the_server_has_counted_takes_the_place_of_the_estimate():
    clock = Clock()
    limit = RateLimit(tokens_per_minute=100, clock=clock, wait=clock.wait)
    limit.settle(limit.acquire(90, 1e9), 10)
    assert limit.acquire(90, 1e9)[0] == 0
    assert limit.acquire(90, 1e9)[0] == 60


def test_a_limit_that_leaves_no_room_in_time_is_an_error():
    clock = Clock()
    limit = RateLimit(requests_per_minute=1, clock=clock, wait=clock.wait)
    limit.acquire(1, 1e9)
    with pytest.raises(TimeoutError, match="no room in time"):
        limit.acquire(1, deadline=30.0)
    assert clock.now == 30.0


class Chat(BaseHTTPRequestHandler):
    """Chat completions: the answer is the server's, which also counts who asks at the same time."""

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            server.num_inside += 1
            server.most_inside = max(server.most_inside, server.num_inside)
        time.sleep(0.05)
        with server.lock:
            server.num_inside -= 1
        text = json.dumps(server.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    server.lock, server.asked, server.num_inside, server.most_inside = threading.Lock(), [], 0, 0
    server.answer = {"choices": [{"message": {"content": "Score: 0.5"}}], "usage": {"total_tokens": 7}}
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_question_and_its_answer(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    judge = Judge(JudgeSettings(server.url, "m", api_key_env="JUDGE_KEY", max_tokens=9))
    messages = [{"role": "user", "content": "good?"}]
    assert judge.ask(messages) == "Score: 0.5"
    body = {"model": "m", "messages": messages, "max_tokens": 9, "temperature": 0.0}
    assert server.asked == [("/v1/chat/completions", "Bearer k", body)]


def test_no_more_at_the_same_time_than_allowed(server):
    judge = Judge(JudgeSettings(server.url, "m", max_concurrency=3))
    threads = [threading.Thread(target=judge.ask, args=([{"role": "user", "content": "x"}],)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 12
    assert server.most_inside <= 3


def test_a_rate_that_leaves_no_room_is_a_time_out(server):
    judge = Judge(JudgeSettings(server.url, "m", requests_per_minute=1, timeout_s=0.3))
    judge.ask([{"role": "user", "content": "x"}])
    with pytest.raises(TimeoutError, match="requests or tokens per minute"):
        judge.ask([{"role": "user", "content": "x"}])
    assert len(server.asked) == 1


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"choices": 3}])
def test_an_answer_without_text_is_an_error(server, answer):
    server.answer = answer
    with pytest.raises(RewardError, match="expected a chat completion"):
        Judge(JudgeSettings(server.url, "m")).ask([{"role": "user", "content": "x"}])


def test_scores_are_read_or_missed():
    assert read_score("Score: 1\nno, Score: -0.5", r"Score: (-?[\d.]+)") == -0.5
    with pytest.raises(ValueError, match="expected a match"):
        read_score("fine", r"Score: (\d+)")


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="judge max_concurrency: got 0"):
        JudgeSettings("u", "m", max_concurrency=0)
    with pytest.raises(ConfigError, match="judge timeout_s: got 'x'"):
        JudgeSettings("u", "m", timeout_s="x")
    with pytest.raises(ConfigError, match="QUADRIGA_NO_KEY, which is not set"):
        Judge(JudgeSettings("u", "m", api_key_env="QUADRIGA_NO_KEY"))
