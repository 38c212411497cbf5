# SPDX-License-Identifier: Apache-2.0
"""How many ordinary programming problems the code grader grades in a minute, and how long short answers take.

    python benchmarks/code_grader.py --problems 200 --tests 5 --workers 2
    python benchmarks/code_grader.py --quick 1024          # that many answers to sums (gsm8k) instead

Each problem has a program of its own that reads its standard input and prints, and `--tests` tests; nothing is shared
between problems. Printed: problems a minute by the clock, and CPU time a problem, which a busy machine does not change
much: two cores give 120 s of it a minute.
"""

import argparse
import resource
import time

from quadriga.rewards import GradingPool, ScoreFunction

PROGRAM = """```python
import sys
from collections import Counter, deque
import heapq

def main():
    data = list(map(int, sys.stdin.read().split()))
    n, values = data[0], data[1:]
    counts = Counter(values)
    heap = [(-count, value) for value, count in counts.items()]
    heapq.heapify(heap)
    total = {number}
    while heap:
        count, value = heapq.heappop(heap)
        total += value * -count
    print(total)

main()
```"""


def main() -> None:
    """Grade the problems once and print the rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--tests", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--quick", type=int, metavar="N", help="grade N short answers instead of programs"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        quick(arguments.quick, arguments.workers)
        return
    rows = [_row(number, arguments.tests) for number in range(arguments.problems)]
    options = {"code": {"total_s": 100.0, "wall_s": 60.0, "parallel": 1}}
    with GradingPool(ScoreFunction(reward_kwargs=options), num_workers=arguments.workers) as pool:
        pool.grade(rows[: arguments.workers], timeout_s=120)
        begun = time.monotonic()
        outcomes = pool.grade(rows, timeout_s=120)
        wall_s = time.monotonic() - begun
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    wrong = [outcome for outcome in outcomes if outcome.score != 1.0]
    assert not wrong, wrong[0]
    cpu_s = (usage.ru_utime + usage.ru_stime) / (len(rows) + arguments.workers)
    print(
        f"{len(rows)} problems of {arguments.tests} tests, {arguments.workers} workers, all right"
    )
    print(f"{60 * len(rows) / wall_s:.0f} problems a minute by the clock ({wall_s:.1f} s)")
    print(
        f"{1000 * cpu_s:.0f} ms of CPU time a problem: two free cores make {120 / cpu_s:.0f} a minute"
    )


def quick(num_rows: int, num_workers: int) -> None:
    """Grade sums and print the seconds, the start of the processes aside."""
    rows: list[dict[str, object]] = [
        {
            "data_source": "openai/gsm8k",
            "solution_str": f"#### {n}",
            "ground_truth": str(n),
            "extra_info": {},
        }
        for n in range(num_rows)
    ]
    with GradingPool(ScoreFunction(), num_workers=num_workers) as pool:
        pool.grade(rows[:num_workers], timeout_s=60)
        begun = time.monotonic()
        outcomes = pool.grade(rows, timeout_s=60)
        wall_s = time.monotonic() - begun
    assert all(outcome.score == 1.0 for outcome in outcomes)
    print(f"{num_rows} short answers, {num_workers} workers, all right ({wall_s:.3f} s)")


def _row(number: int, num_tests: int) -> dict[str, object]:
    inputs, outputs = [], []
    for test in range(num_tests):
        values = [(7 * number + 13 * test * step) % 101 for step in range(1000)]
        inputs.append(f"{len(values)}\n{' '.join(map(str, values))}\n")
        outputs.append(f"{number + sum(values)}\n")
    program = PROGRAM.replace("{number}", str(number))
    truth = {"inputs": inputs, "outputs": outputs}
    return {"data_source": "taco", "solution_str": program, "ground_truth": truth, "extra_info": {}}


if __name__ == "__main__":
    main()
