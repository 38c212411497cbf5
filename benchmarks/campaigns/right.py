# SPDX-License-Identifier: Apache-2.0
"""Right programs in the grader `code`, as root and as another user: containment must not be in the way of any.

A case's number makes the input of one of the programs. What is expected comes from a function here, not from the
program.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.campaign import Campaign, Outcome
from campaigns.hostile import grade

# Under each name a program that prints the sum of the numbers on its standard input.
_SUMS = r"""
## plain
n = int(input())
print(sum(map(int, input().split())))
## all at once
import sys
print(sum(map(int, sys.stdin.read().split()[1:])))
## bytes
import sys
sys.stdout.buffer.write(b"%d\n" % sum(map(int, sys.stdin.buffer.read().split()[1:])))
## descriptor
import os
data = b"".join(iter(lambda: os.read(0, 65536), b""))
os.write(1, str(sum(map(int, data.split()[1:]))).encode())
## file 0
print(sum(map(int, open(0).read().split()[1:])))
## /dev/stdin
print(sum(map(int, open("/dev/stdin").read().split()[1:])))
## mapped input
import mmap
print(sum(map(int, bytes(mmap.mmap(0, 0, prot=mmap.PROT_READ)).split()[1:])))
## main
def main():
    input()
    print(sum(map(int, input().split())))
if __name__ == "__main__":
    main()
## class
from dataclasses import dataclass
@dataclass
class Sum:
    values: list[int]
    def total(self):
        return sum(self.values)
input()
print(Sum(list(map(int, input().split()))).total())
## numpy
import numpy as np
input()
print(np.array(input().split(), dtype=np.int64).sum())
## numpy, linear algebra
import numpy as np
input()
v = np.array(input().split(), dtype=float)
print(int(round((np.ones((64, 64)) @ np.eye(64))[0, 0] * np.dot(v, np.ones(len(v))))))
## numpy, Fourier and solve
import numpy as np
input()
v = np.array(input().split(), dtype=float)
np.linalg.solve(np.eye(50) * 2, np.ones(50))
print(int(round(np.fft.fft(v)[0].real)))
## asyncio
import asyncio
async def add(queue, values):
    for value in values:
        await queue.put(value)
    await queue.put(None)
async def main():
    input()
    queue, total = asyncio.Queue(4), 0
    task = asyncio.create_task(add(queue, list(map(int, input().split()))))
    while (value := await queue.get()) is not None:
        total += value
    await asyncio.gather(task, asyncio.sleep(0.001))
    print(total)
asyncio.run(main())
## asyncio, threads and timeouts
import asyncio
async def main():
    await asyncio.to_thread(input)
    values = await asyncio.wait_for(asyncio.to_thread(input), 5)
    print(sum(map(int, values.split())))
asyncio.run(main())
## asyncio, streams over a pair
import asyncio, socket
async def main():
    a, b = socket.socketpair()
    reader, kept = await asyncio.open_connection(sock=a)
    unread, writer = await asyncio.open_connection(sock=b)
    input()
    writer.write(input().encode() + b"\n")
    writer.writelines([b"x" * 100000] * 3)
    writer.close()
    print(sum(map(int, (await reader.readline()).split())))
    assert len(await reader.read()) == 300000
asyncio.run(main())
## asyncio, a signal handler
import asyncio, os, signal
async def main():
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, event.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await event.wait()
    input()
    print(sum(map(int, input().split())))
asyncio.run(main())
## threads
import threading
input()
values, total, lock = list(map(int, input().split())), 0, threading.Lock()
def add(part):
    global total
    for value in part:
        with lock:
            total += value
threads = [threading.Thread(target=add, args=(values[k::4],)) for k in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(total)
## thread pool
from concurrent.futures import ThreadPoolExecutor
input()
values = list(map(int, input().split()))
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(lambda k: sum(values[k::8]), range(8))))
## queue
import queue, threading
jobs = queue.Queue()
input()
values = list(map(int, input().split()))
threading.Thread(target=lambda: [jobs.put(v) for v in values], daemon=True).start()
print(sum(jobs.get(timeout=5) for _ in values))
## timer
import threading
input()
total = sum(map(int, input().split()))
threading.Timer(0.01, lambda: print(total)).start()
## deep recursion
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 27)
def total(values, at=0):
    return values[at] + total(values, at + 1) if at < len(values) else 0
def depth(n):
    return n and 1 + depth(n - 1)
def main():
    input()
    print(total(list(map(int, input().split()))) + depth(30000) - 30000)
threading.Thread(target=main).start()
## deep recursion on the main stack
import resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (resource.getrlimit(resource.RLIMIT_STACK)[1],) * 2)
sys.setrecursionlimit(10**5)
def total(n, values):
    return values[n] + total(n - 1, values) if n >= 0 else 0
n = int(input())
print(total(n - 1, list(map(int, input().split()))))
## files
import os
input()
with open("numbers.txt", "w") as f:
    f.write(input())
os.rename("numbers.txt", "renamed.txt")
with open("renamed.txt") as f:
    print(sum(map(int, f.read().split())))
os.remove("renamed.txt")
## files, read and written
import os
with open("data", "w+b") as f:
    input()
    f.write(input().encode())
    f.flush()
    os.fsync(f.fileno())
    f.seek(0)
    print(sum(map(int, f.read().split())))
    f.truncate(3)
assert os.path.getsize("data") == 3 and os.listdir(".") == ["data"]
## pathlib and shutil
import pathlib, shutil
input()
pathlib.Path("a.txt").write_text(input())
shutil.copyfile("a.txt", "b.txt")
print(sum(map(int, pathlib.Path("b.txt").read_text().split())))
## tempfile
import tempfile
input()
with tempfile.TemporaryFile("w+") as f, tempfile.NamedTemporaryFile() as g, tempfile.SpooledTemporaryFile() as h:
    f.write(input())
    f.seek(0)
    print(sum(map(int, f.read().split())))
## csv, json, pickle, zip
import csv, io, json, pickle, zipfile
input()
values = json.loads(json.dumps(pickle.loads(pickle.dumps(list(map(int, input().split()))))))
with zipfile.ZipFile("z.zip", "w") as z:
    z.writestr("a", "b")
print(sum(int(cell) for row in csv.reader(io.StringIO("\n".join(map(str, values)))) for cell in row))
## sqlite
import sqlite3
base = sqlite3.connect(":memory:")
base.execute("create table t (v integer)")
input()
base.executemany("insert into t values (?)", [(int(v),) for v in input().split()])
print(base.execute("select sum(v) from t").fetchone()[0])
## sqlite in a file
import sqlite3
base = sqlite3.connect("base.db")
base.execute("create table t (v integer)")
input()
base.executemany("insert into t values (?)", [(int(v),) for v in input().split()])
base.commit()
print(base.execute("select sum(v) from t").fetchone()[0])
## time zones
import datetime, zoneinfo
when = datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
assert when.utcoffset() == datetime.timedelta(hours=2) and datetime.datetime.now().astimezone()
input()
print(sum(map(int, input().split())))
## decimals and fractions
from decimal import Decimal, getcontext
from fractions import Fraction
getcontext().prec = 50
input()
values = input().split()
assert sum(map(Decimal, values)) == sum(map(Fraction, values))
print(sum(map(Decimal, values)))
## random, hashes, secrets
import hashlib, random, secrets, uuid
random.seed(3)
secrets.token_bytes(8), uuid.uuid4(), hashlib.sha256(b"x").hexdigest(), random.SystemRandom().random()
input()
values = list(map(int, input().split()))
random.shuffle(values)
print(sum(values))
## select, poll, epoll, pipes
import os, select
r, w = os.pipe()
input()
os.write(w, input().encode())
poll, epoll = select.poll(), select.epoll()
poll.register(r, select.POLLIN)
epoll.register(r)
assert select.select([r], [], [], 1)[0] and poll.poll(100) and epoll.poll(1)
print(sum(map(int, os.read(r, 65536).split())))
## signals to itself
import signal, time
got = []
signal.signal(signal.SIGALRM, lambda *a: got.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
while not got:
    time.sleep(0.005)
signal.raise_signal(signal.SIGALRM)
input()
print(sum(map(int, input().split())) + len(got) - 2)
## faulthandler and logging
import faulthandler, logging, warnings
faulthandler.enable()
faulthandler.dump_traceback_later(60)
logging.basicConfig(level=logging.DEBUG)
logging.info("here")
warnings.warn("there")
input()
print(sum(map(int, input().split())))
faulthandler.cancel_dump_traceback_later()
## at exit
import atexit
out = []
atexit.register(lambda: print(*out))
input()
out.append(sum(map(int, input().split())))
## exit
import sys
input()
print(sum(map(int, input().split())))
sys.exit(0)
## memory
blocks = [bytearray(1 << 20) for _ in range(200)]
input()
print(sum(map(int, input().split())) + sum(map(len, blocks)) - (200 << 20))
## mapped memory
import mmap
m = mmap.mmap(-1, 1 << 20)
input()
m.write(input().encode() + b"\n")
m.seek(0)
print(sum(map(int, m.readline().split())))
## about the machine
import getpass, os, platform, resource, shutil, sys, time
os.cpu_count(), platform.platform(), sys.getsizeof(0), resource.getrusage(0), os.times(), os.uname()
shutil.get_terminal_size(), shutil.disk_usage("."), time.process_time(), os.sched_getaffinity(0), os.getpgrp()
input()
print(sum(map(int, input().split())))
## heap, counter, bisect
import bisect, collections, functools, heapq, itertools
input()
heap = list(map(int, input().split()))
heapq.heapify(heap)
print(functools.reduce(lambda a, b: a + b, (heapq.heappop(heap) for _ in range(len(heap)))))
## regular expressions
import re, sys
print(sum(int(m) for m in re.findall(r"-?\d+", sys.stdin.read())[1:]))
## generators and contexts
from contextlib import contextmanager
@contextmanager
def numbers():
    input()
    yield map(int, input().split())
with numbers() as values:
    print(sum(v for v in values))
"""

_CALLS = r"""
## function
def total(values):
    return sum(values)
## method
class Solution:
    def total(self, values: list[int]) -> int:
        return sum(values)
## method, cached
from functools import cache
class Solution:
    def total(self, values):
        @cache
        def upto(n):
            return values[n] + upto(n - 1) if n >= 0 else 0
        return upto(len(values) - 1)
## of numpy
import numpy
def total(values):
    print("noise")
    return numpy.array(values).sum()
"""

# Programs that print more than a sum; by name, the program and what it prints for n.
_PRINTED: dict[str, tuple[str, Callable[[int], str]]] = {
    "large output": (
        "n = int(input())\nprint('\\n'.join(map(str, range(n * 1000))))",
        lambda n: "\n".join(map(str, range(n * 1000))),
    ),
    "large output, line by line": (
        "for k in range(int(input()) * 200):\n    print(k, k * k, flush=k % 100 == 0)",
        lambda n: "\n".join(f"{k} {k * k}" for k in range(n * 200)),
    ),
    "floating numbers": (
        "n = int(input())\nprint(1 / n, n ** 0.5)",
        lambda n: f"{1 / n:.9f} {n**0.5:.9f}",
    ),
    "huge integers": ("n = int(input())\nprint(7 ** (n * 5))", lambda n: str(7 ** (n * 5))),
    "unicode": ("n = int(input())\nprint('äß€😀' * n)", lambda n: "äß€😀" * n),
}


def _blocks(text: str) -> list[tuple[str, str]]:
    parts = [block.partition("\n") for block in text.split("\n## ")[1:]]
    return [(name, program) for name, _, program in parts]


_KINDS = [
    *[("sum", *block) for block in _blocks(_SUMS)],
    *[("call", *block) for block in _blocks(_CALLS)],
    *[("printed", name, program) for name, (program, _) in _PRINTED.items()],
]


def run(number: int, folder: Path, files: Path) -> Outcome:
    """Grade one right program, on two inputs, as one user."""
    kind, name, program = _KINDS[(number - 1) % len(_KINDS)]
    user = ("root", "user")[(number - 1) // len(_KINDS) % 2]
    chosen = random.Random(number)
    lists = [
        [chosen.randint(-(10**6), 10**6) for _ in range(chosen.randint(2, 500))] for _ in range(2)
    ]
    if kind == "sum":
        inputs: list[Any] = [f"{len(values)}\n{' '.join(map(str, values))}\n" for values in lists]
        tests: dict[str, Any] = {
            "inputs": inputs,
            "outputs": [f"{sum(values)}\n" for values in lists],
        }
    elif kind == "call":
        tests = {
            "inputs": [[values] for values in lists],
            "outputs": list(map(sum, lists)),
            "fn_name": "total",
        }
    else:
        counts = [len(values) for values in lists]
        tests = {
            "inputs": [f"{n}\n" for n in counts],
            "outputs": [_PRINTED[name][1](n) for n in counts],
        }
    told = grade(user, program, tests, has_victim=False, wall_s=20.0, total_s=40.0)
    failure = (
        ""
        if told["score"] == 1
        else f"{name}: score {told['score']}, {told['reason']}, of {json.dumps(tests)[:200]}"
    )
    return Outcome(user, failure, {"wall_s": told.get("wall_s", 0.0)})


CAMPAIGN = Campaign(
    what="Correct programs in the grader: numpy, asyncio, threads, deep recursion, files, large output",
    promise="Score 1",
    wanted={"": 200},
    run=run,
    cases=20,
    processes=2,
)
