# SPDX-License-Identifier: Apache-2.0
"""The page of `quadriga view` in headless Chromium: every page, from a server and from an exported file.

Text of models, prompts, metrics and run names holds a script in all of it: it must be shown, never run.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.view.data import ViewData
from quadriga.view.page import export
from quadriga.view.server import ViewServer
from tests.unit.view.recorded import EVIL, rollout, write_run, write_step

sync_api = pytest.importorskip(
    "playwright.sync_api",
    reason="NOT RUN: the page in a browser needs Playwright: pip install playwright",
)
CHROMIUM = shutil.which("chromium")
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PAGES = ("runs", "curves", "rollouts", "prompts", "coverage", "time", "health")
NAME = "run<img src=x onerror=window.attacked=1>"


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("NOT RUN: the page in a browser needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield launched
        launched.close()


def _visit_all(page: Any, address: str) -> None:
    """Open every page by its link, filter and open rollouts, and point at a token."""
    page.goto(address)
    page.get_by_role("cell", name=NAME, exact=True).wait_for()
    for name in PAGES:
        page.click(f"nav a[data-page={name}]")
        page.wait_for_selector(f"nav a[data-page={name}][aria-current=page]")
    page.get_by_text("collapsed").wait_for()
    page.get_by_text(f"Rank 1 of {EVIL} takes 2.0 times").wait_for()
    page.keyboard.press("6")
    page.get_by_text("1 · 2.0×").wait_for()
    page.get_by_text("weights 8").wait_for()
    page.locator(".lane", has_text="10-0 · 9").locator("rect").first.hover()
    page.get_by_text("generated with weights 7 to 8").wait_for()

    page.keyboard.press("3")
    rows = page.locator(".list .row")
    rows.nth(3).wait_for()
    assert EVIL in rows.first.inner_text()
    page.locator(".histogram button").first.click()
    page.get_by_text("Every score of these rollouts is 0: 3 truncated").wait_for()
    page.locator(".histogram button").last.click()
    page.get_by_text("1 of 4 rollouts").wait_for()
    rows.first.focus()
    page.keyboard.press("Enter")
    page.get_by_text("Trained: all 4 generated tokens, with a mean advantage of 0.5").wait_for()
    page.locator(".tokens span").nth(3).hover()
    page.get_by_text("log-prob, trainer -1").wait_for()
    page.get_by_label("colored by").select_option("mismatch")
    sync_api.expect(page.locator(".legend")).to_have_text("00.5")
    page.keyboard.press("Escape")
    page.get_by_text("1 of 4 rollouts").wait_for()

    # Step 9 is without the prompt.
    page.keyboard.press("4")
    page.locator("tr.click").nth(1).click()
    page.get_by_text("Steps with this prompt: 9").wait_for()
    page.keyboard.press("[")
    sync_api.expect(page.locator("input[aria-label=step]")).to_have_value("8")
    page.get_by_text("2 of 4 rollouts").wait_for()

    page.keyboard.press("2")
    page.get_by_label("filter metrics").fill(EVIL)
    page.get_by_label(EVIL[:8]).first.check()
    plot = page.locator(".u-over").first
    plot.wait_for()
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] - 2, "y": box["height"] / 2})
    page.get_by_text("A click opens one").wait_for()


def test_every_page(browser: Any, tmp_path: Path) -> None:
    """Every page opens without an error on the console, in both forms; no text of a model runs as a script."""
    columns = {"response_ids": [8, 6, 7, 1], "data_source": EVIL, "prompt_ids": [0, 8, 5]}
    columns |= {"queued_at": 10.0, "admitted_at": 11.0, "generated_at": 13.0, "graded_at": 13.5}
    columns |= {"token_versions": [7, 7, 7, 8]}
    calls = {f"{EVIL}.update_actor": [[0, 1.0, 2.0, 1.0], [1, 1.0, 2.0, 0.0]]}
    run = write_run(tmp_path / "runs" / NAME, 10, calls=calls, **columns)
    write_step(run, 9, [rollout(9, 1, number, **columns) for number in range(2)])
    data = ViewData([run.parent], cache=tmp_path / "cache")
    server = ViewServer(data, "127.0.0.1", 0)
    file = tmp_path / "page.html"
    export(data, file, None)
    for address, width in ((server.url, 1300), (file.as_uri(), 420)):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark")
        complaints: list[str] = []
        page.on("console", lambda message, log=complaints: log.append(message.text))
        page.on("pageerror", lambda error, log=complaints: log.append(str(error)))
        _visit_all(page, address)
        assert page.evaluate("window.attacked") is None
        assert complaints == []
        page.close()
    server.close()
