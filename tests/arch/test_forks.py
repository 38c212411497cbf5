# SPDX-License-Identifier: Apache-2.0
"""Processes are not forked, but where there is a reason."""

import pytest

from arch_forks import MAY_FORK, fork_without_a_reason, forks
from arch_tree import Source, all_sources

BAD = [
    "import os\ndef f(): os.fork()",
    "from os import fork as split\nsplit()",
    "import subprocess\nsubprocess.run(['ls'], preexec_fn=print)",
    "import multiprocessing as mp\nmp.get_context('fork')",
    "from multiprocessing import get_context\nget_context()",
    "from torch.multiprocessing import get_context\nget_context(method='fork')",
    "import multiprocessing\nmultiprocessing.Process(target=print)",
    "from multiprocessing import Pool\nPool(2)",
    "import torch.multiprocessing as mp\nmp.Pool(2)",
    "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2)",
    "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor(max_workers=2)",
    "from multiprocessing import set_start_method\nset_start_method('spawn')",
    "from torch.utils.data import DataLoader\nDataLoader(rows, num_workers=2)",
]
GOOD = [
    "from multiprocessing import get_context\ncontext = get_context('spawn')\ncontext.Process(target=print)",
    "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2, context)",
    "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2, mp_context=context)",
    "import psutil\npsutil.Process(1)",
    "class Pool: ...\nPool()",
    "from torch.utils.data import DataLoader\nDataLoader(rows, num_workers=2, multiprocessing_context='fork')",
    "from torch.utils.data import DataLoader\nDataLoader(rows, num_workers=0)",
    "import subprocess\nsubprocess.Popen(['ls'], start_new_session=True)",
]


def test_nothing_is_forked_without_a_reason() -> None:
    """No file of ours breaks the rule, tests and benchmarks included."""
    complaints = [
        complaint for source in all_sources() for complaint in fork_without_a_reason(source)
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("text", BAD)
def test_rule_complains(text: str) -> None:
    """A file that breaks the rule is found."""
    assert list(fork_without_a_reason(Source("quadriga/x.py", text)))


@pytest.mark.parametrize("text", GOOD)
def test_rule_is_silent(text: str) -> None:
    """A file that keeps the rule is left in peace."""
    assert list(fork_without_a_reason(Source("quadriga/x.py", text))) == []


def test_each_reason_is_still_needed() -> None:
    """Each place in the table still forks, and has a reason."""
    places = {place for source in all_sources() for place, _, _ in forks(source)}
    for place, reason in MAY_FORK.items():
        assert reason and place in places, place
