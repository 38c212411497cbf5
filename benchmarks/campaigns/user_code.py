# SPDX-License-Identifier: Apache-2.0
"""Rewards, tools, user simulators and agent loops that misbehave, in small real runs that must come to their end.

A case draws what half of its samples meet: a deed of a reward, a tool, a user simulator or a loop of one's own. The run
(GRPO, three steps, graders in a pool or conversations in the async rollout) must end with status 0, count each failure
in its metrics, keep its reason with the sample, say it, keep its log small, and leave no process and no temporary file
behind. One case in ten sets a threshold of errors that the deed exceeds: that run must stop and say so.

Runs are forks of an interpreter that has loaded the modules; everything else is real.
"""

import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from campaigns.campaign import Campaign, Outcome
from quadriga.cli.main import main
from quadriga.descendants import descendants, end_descendants
from quadriga.trainer.task_runner import TaskRunner  # noqa: F401 (loaded before the forks)
from tests.e2e import conftest as tiny

NUM_STEPS, LIMIT_S, LOG_BYTES, MARK = 3, 240.0, 400_000, "7321.5"

DEEDS: dict[str, str] = {
    "fine": "pass",
    "raise": "raise KeyError('no such answer')",
    "raise_base": "raise type('Odd', (BaseException,), {})('odd')",
    "interrupt": "raise KeyboardInterrupt",
    "stop_iteration": "raise StopIteration(3)",
    "sys_exit": "sys.exit(3)",
    "hang": "time.sleep(1000)",
    "spin": "while True: pass",
    "deadlock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "fork": "os.fork()",
    "setsid": "subprocess.Popen(['sleep', MARK], start_new_session=True, env={})",
    "double_fork": "os.fork() or (os.setsid(), os.fork() or os.execvp('sleep', ['sleep', MARK]), os._exit(0))",
    "print": "print('x' * 5_000_000); sys.stderr.write('y' * 5_000_000)",
    "chdir": "os.chdir('/')",
    "replace_stdout": "sys.stdout = open(os.devnull, 'w')",
    "close_stdout": "sys.stdout.close()",
    "none": "return None",
    "nan": "return float('nan')",
    "huge": "return 10 ** 400",
    "text": "return 'z' * 1_000_000",
    "odd_object": "return object()",
}
# What a thread of the process that generates cannot do without taking it along, or is no failure there.
ONLY_REWARD = {
    "os_exit": "os._exit(7)",
    "crash": "ctypes.string_at(0)",
    "memory": "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, -1)); [bytearray(1 << 26) for _ in range(999)]",
    "close_all": "os.closerange(3, 1000)",
    "kill_group": "os.killpg(0, signal.SIGKILL)",
    "stop_supervisor": "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)",
    "kill_supervisor": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)",
    "catastrophic_regex": "re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "traceback_of_megabytes": "raise ValueError('w' * 3_000_000)",
}
HARMLESS = {
    "fine",
    "fork",
    "setsid",
    "double_fork",
    "print",
    "chdir",
    "replace_stdout",
    "close_stdout",
}
# What a tool returns is written for the model: any of these is a text.
TEXTS = {"none", "nan", "huge", "text", "odd_object"}
WHO = ("reward", "reward", "tool", "interaction", "loop")
HEAD = (
    "import ctypes, os, re, resource, signal, subprocess, sys, threading, time\n"
    + f"MARK = '{MARK}'\n"
)
FILES = {
    "reward": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 2:
        {deed}
    return float(len(solution_str))
""",
    "tool": """
from quadriga.rollout.agent_loop import AgentLoop, Tool, register

def deed(index):
    if index % 2:
        {deed}
    return "fine"

@register("campaign_loop")
class Loop(AgentLoop):
    async def run(self, chat):
        await chat.generate(max_tokens=3)
        index = chat.sample.columns["extra_info"]["index"]
        await self.services.thread.call("tool deed", deed, {{"index": index}}, 2.0)
""",
    "interaction": """
from quadriga.rollout.agent_loop import AgentLoop, Interaction, Reply, register
from quadriga.rollout.agent_loop.interactions import UserSimulator

class User(Interaction):
    def generate_response(self, messages):
        if self.index % 2:
            {deed}
        return Reply(score=1.0, is_over=True)

    def start_interaction(self, index):
        self.index = index

@register("campaign_loop")
class Loop(AgentLoop):
    async def run(self, chat):
        await chat.generate(max_tokens=3)
        index = chat.sample.columns["extra_info"]["index"]
        user = UserSimulator({{"user": User}}, {{"name": "user", "index": index}}, self.services.thread, 2.0)
        async with user:
            chat.turn_scores.append((await user.reply(chat.messages)).score)
""",
    "loop": """
from quadriga.rollout.agent_loop import AgentLoop, register

@register("campaign_loop")
class Loop(AgentLoop):
    async def run(self, chat):
        await chat.generate(max_tokens=3)
        if chat.sample.columns["extra_info"]["index"] % 2:
            {deed}
""",
}


def prepare(files: Path) -> None:
    """A model and its rows."""
    home = files / "home"
    if (home / "done").is_file():
        return
    home.mkdir(parents=True)
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    LlamaForCausalLM(tiny.build_config(tokenizer)).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    tiny.write_rows(home / "train.parquet", [tiny.make_row(number) for number in range(12)])
    tiny.write_rows(home / "val.parquet", [tiny.make_row(number) for number in range(2)])
    (home / "reward.py").write_text(tiny.REWARD)
    (home / "done").touch()


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One run; what it promises follows from who does what in it."""
    draw = random.Random(number)
    who = draw.choice(WHO)
    deeds = DEEDS | (ONLY_REWARD if who == "reward" else {})
    deed = draw.choice(
        [name for name in deeds if not (who == "loop" and name in ("deadlock", "interrupt"))]
    )
    is_async = who != "reward" or draw.random() < 0.5
    fails = deed not in HARMLESS and not (who in ("tool", "loop") and deed in TEXTS)
    stops = who == "reward" and fails and draw.random() < 0.1
    (folder / "mine.py").write_text(HEAD + FILES[who].format(deed=deeds[deed]))
    words = [
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.rollout_data_dir=run/rollouts",
        "reward_model.timeout_s=2",
        "reward_model.num_workers=2",
        f"reward_model.max_error_rate={0.2 if stops else 1.0}",
        *(
            ["actor_rollout_ref.rollout.mode=async", "data.return_raw_chat=True"]
            if is_async
            else []
        ),
    ]
    if who == "reward":
        words.append(f"custom_reward_function.path={folder / 'mine.py'}")
    else:
        agent = "actor_rollout_ref.rollout.agent"
        words += [
            f"{agent}.agent_loop_path={folder / 'mine.py'}",
            f"{agent}.default_agent_loop=campaign_loop",
        ]
        words += [f"{agent}.timeout_s=2", "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=2"]
    told = f"{who} {deed}{', async' * is_async}{', over the threshold' * stops}"
    began = time.monotonic()
    status, left = _run(folder, ["train", *tiny.command_line(files / "home", folder, *words)])
    figures = {
        "seconds": time.monotonic() - began,
        "log_bytes": float((folder / "log").stat().st_size),
    }
    failure = _failure(folder, who, status, fails=fails, stops=stops)
    if left:
        failure = failure or f"left behind: {left}"
    return Outcome(who, f"{told}: {failure}, see {folder / 'log'}" if failure else "", figures)


def _failure(folder: Path, who: str, status: int | None, *, fails: bool, stops: bool) -> str:
    """What was not as promised; "" where everything was."""
    log = (folder / "log").read_text(errors="replace")
    if len(log) > LOG_BYTES:
        return f"a log of {len(log):,} characters"
    if stops:
        is_said = "max_error_rate" in log and "could not be graded" in log
        return (
            ""
            if status == 1 and is_said
            else f"status {status}, and the threshold is{'' if is_said else ' not'} named"
        )
    if status != 0:
        return f"status {status}"
    return _failure_in_records(folder, who, log, fails=fails)


def _failure_in_records(folder: Path, who: str, log: str, *, fails: bool) -> str:
    """Of a run that ended: its metrics, its samples and its log must tell the same."""
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    samples = [
        json.loads(line)
        for path in sorted((folder / "run" / "rollouts").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    if len(lines) != NUM_STEPS or len(samples) != NUM_STEPS * 8:
        return f"{len(lines)} steps, {len(samples)} samples"
    name, column = (
        ("reward/errors", "reward_error")
        if who == "reward"
        else ("rollout/num_failures", "finish_reason")
    )
    # Half of the rows are meant, in any order: how many a step has must be the same in all places.
    counted = sum(line[name] for line in lines)
    stored = sum(_is_failure(sample.get(column)) for sample in samples)
    said = "could not be graded" in log if who == "reward" else "conversations failed" in log
    if counted != stored or bool(counted) != fails or said != fails:
        return f"{counted} failures counted, {stored} stored, said: {said}, expected: {'some' if fails else 'none'}"
    return ""


def _is_failure(reason: Any) -> bool:
    return bool(reason) and (not isinstance(reason, str) or reason not in ("stop", "length"))


def _run(folder: Path, arguments: list[str]) -> tuple[int | None, list[str]]:
    """The exit status (None: it was killed after `LIMIT_S`), and what is left of the run some seconds later."""
    (folder / "tmp").mkdir()
    libc = ctypes.CDLL(None)
    # What loses its parent becomes a child of this process, which then sees it.
    libc.prctl(36, 1)
    pid = os.fork()
    if not pid:
        _become_run(folder, arguments)
    until, status = time.monotonic() + LIMIT_S, None
    while status is None and time.monotonic() < until:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.02)
    if status is None:
        os.kill(pid, signal.SIGKILL)
    left: list[str] = []
    for _ in range(100):
        _reap()
        left = [_command(one) for one in descendants(os.getpid())]
        if not left:
            break
        time.sleep(0.05)
    end_descendants(os.getpid())
    _reap()
    return status, left + [str(path) for path in (folder / "tmp").iterdir()]


def _become_run(folder: Path, arguments: list[str]) -> None:
    status = 1
    try:
        os.setsid()
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "tmp")}
        tempfile.tempdir = None
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # As a command, whose guardian ends what is left.
        sys.argv = ["quadriga", *arguments]
        status = main()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:200]
        )
    except OSError:
        return f"process {pid}"


CAMPAIGN = Campaign(
    what="Rewards, tools, user simulators and agent loops that raise, hang, exit, fork, use up memory or "
    "print megabytes",
    promise="Each failure is counted, stored and reported; the run finishes; nothing of the failed code is left",
    wanted={"": 300, "reward": 100, "tool": 50, "interaction": 50, "loop": 50},
    run=run,
    cases=30,
    processes=2,
    prepare=prepare,
)
