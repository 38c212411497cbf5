# SPDX-License-Identifier: Apache-2.0
"""The page's server and its exported file: who may ask, and that text of a model stays text."""

import json
import re
from pathlib import Path

import httpx2
import pytest

from quadriga.cli.main import main
from quadriga.errors import ConfigError, DataError
from quadriga.view import page
from quadriga.view.data import ViewData
from quadriga.view.server import ViewServer
from tests.unit.view.recorded import EVIL, write_run


def test_who_may_ask(tmp_path: Path) -> None:
    """Data need the token, everything needs a name of this server; a port in use is named."""
    data = ViewData([write_run(tmp_path / "run", 1)], cache=tmp_path / "cache")
    server = ViewServer(data, "127.0.0.1", 0)
    address, token = server.url.split("/?token=")
    with httpx2.Client(base_url=address) as client:
        index = client.get("/")
        assert "script-src 'self'" in index.headers["content-security-policy"]
        for name in re.findall(r'(?:src|href)="(static/[^"]+)"', index.text):
            assert client.get(f"/{name}").status_code == 200
        runs = client.get("/api/runs", headers={"x-api-key": token})
        assert runs.json() == {"runs": ["run"]}
        assert client.get("/api/runs").status_code == 401
        assert client.get("/api/runs", headers={"x-api-key": f"{token}x"}).status_code == 401
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/static/..%2Fapp.py").status_code == 404
        missing = client.get("/api/rollouts?run=run&step=5", headers={"x-api-key": token})
        assert missing.status_code == 404 and "no record of step 5" in missing.json()["error"]
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="a free port"):
        ViewServer(data, "127.0.0.1", port)
    server.close()
    with pytest.raises(ConfigError, match="--port: got 80000, expected a port from 0 to 65535"):
        ViewServer(data, "127.0.0.1", 80000)


def test_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file holds the chosen steps and says what it lacks; no text of a model ends its script element."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = write_run(tmp_path / "run", 30, response_ids=[8, 6, 7, 1], reward_error=EVIL)
    file = tmp_path / "page.html"
    assert main(["view", str(run), "--export", str(file), "--steps", "2,4-5"]) == 0
    assert "3 of 30 recorded steps" in capsys.readouterr().out
    text = file.read_text()
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == len(page.SCRIPTS) + 1
    [embedded] = re.findall(r'id="embedded">(.*?)</script>', text, re.DOTALL)
    answers = json.loads(embedded)["answers"]
    query = {"kind": "step", "place": "3", "run": "run", "start": "0", "step": "4"}
    rollout = answers[json.dumps(["rollout", query], separators=(",", ":"))]
    assert rollout["response"]["texts"][0] == EVIL
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)

    assert page.default_steps(range(100)) == [*page.default_steps(range(100))][:22]
    assert len(page.default_steps(range(100))) == 22 and page.default_steps([3, 5]) == [3, 5]

    data = ViewData([run])
    monkeypatch.setattr(page, "MAX_EXPORT_BYTES", file.stat().st_size - 8_000)
    notes = page.export(data, file, [2, 4, 5])
    assert any("did not fit" in note for note in notes)
    assert file.stat().st_size <= page.MAX_EXPORT_BYTES

    for steps, got in (([40, 41], "40 to 41"), ([40, 50], "40, 50")):
        with pytest.raises(
            DataError, match=f"--steps: got {got}, expected recorded steps: 1 to 30"
        ):
            page.export(data, file, steps)
    for path, got in ((tmp_path, "a folder"), (tmp_path / "none" / "x.html", "no folder")):
        with pytest.raises(DataError, match=f"got {got}"):
            page.export(data, path, [2])
    assert main(["view", str(run), "--export", str(file), "--steps", "5-2"]) != 0
    assert "numbers and ranges" in capsys.readouterr().err

    before = file.read_bytes()

    def fill(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(DataError, match="No space left on device"):
        page.export(data, file, [2])
    assert file.read_bytes() == before
