# SPDX-License-Identifier: Apache-2.0
"""`quadriga prepare`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.cli.prepare import main


def test_data(tmp_path: Path, capsys):
    arguments = [
        "data",
        "largest",
        "--output",
        str(tmp_path),
        "--num-train",
        "4",
        "--num-val",
        "2",
        "--seed",
        "5",
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"train: {tmp_path / 'train.parquet'}",
        f"val: {tmp_path / 'val.parquet'}",
    ]
    assert (tmp_path / "train.parquet").is_file()


@pytest.mark.parametrize(
    "arguments",
    [[], ["data"], ["data", "largest"], ["model", "x"], ["data", "largest", "--seed", "x"]],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_and_generated_data_need_no_torch(tmp_path: Path):
    program = (
        "import sys; from quadriga.cli.prepare import main; "
        f"main(['data', 'largest', '--output', {str(tmp_path)!r}]); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    # A subprocess does not see the path that pytest.ini_options adds for the second package.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = dict(os.environ) | {"PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert result.stdout.splitlines()[-1] == "[]"
