# SPDX-License-Identifier: Apache-2.0
"""The command lines of docs/first_gpu_run.md."""

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/first_gpu_run.md"


def command_lines(program: str) -> list[list[str]]:
    """Arguments of the page's command lines that begin with `program`."""
    blocks = re.findall(rf"```bash\n{program} (.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def shrunk(words: list[str], overrides: dict[str, str]) -> list[str]:
    """A command line with other values: those of its keys are replaced, others appended."""
    by_key = {word.partition("=")[0]: word for word in words}
    for key, value in overrides.items():
        by_key[key] = f"{key}={value}"
    return list(by_key.values())
