# SPDX-License-Identifier: Apache-2.0
"""examples/notebook.ipynb runs from its first cell to its last, in a kernel of its own, and shows bar and curve."""

import os
from pathlib import Path

import pytest

from tests.limits import NOTEBOOK_S

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has a running event loop, and ends with the test."""
    reason = "the notebook needs nbclient and ipykernel (pip install -e '.[dev]')"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    paths = [
        str(REPOSITORY),
        str(REPOSITORY / "recipes"),
        str(REPOSITORY / "packages"),
        os.environ.get("PYTHONPATH", ""),
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    book = nbformat.read(REPOSITORY / "examples" / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=int(NOTEBOOK_S), resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [
        output.get("data", {}).get("text/html", "")
        for cell in book.cells
        if cell.cell_type == "code" and "quadriga.train(" in cell.source
        for output in cell.outputs
    ]
    assert any("<progress" in html and "step 6/6" in html and "<polyline" in html for html in shown)
