# SPDX-License-Identifier: Apache-2.0
"""What holds the repository together: configuration files that parse, commands that exist, text that fits anywhere."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from arch_tree import REPOSITORY, tracked_files
from tests import limits

PAGES = sorted(name for name in tracked_files() if name.endswith(".md"))
CONFIGS = sorted(
    name for name in tracked_files() if re.fullmatch(r"(configs|examples)/.*\.ya?ml", name)
)
# The class of its sections, by a file's name; the first that fits. The last is the tree of `quadriga train`.
READERS = (
    (r"examples/tools/interactions\.yaml", "InteractionFile"),
    (r"examples/tools/.*", "ToolFile"),
    (r".*", "Config"),
)
MAX_DOC_PAGES = 26  # generated pages not counted
MAX_CONTRIBUTING_LINES = 100
MAX_TEXT_BYTES = 1 << 20

# A bracket in each keeps this file from being found by its own rule.
FOREIGN = {
    "an address of a package index": r"https?://\S+/simple\b|https?://registry\.",
    "a path of one machine": r"(?<![\w.:/])/([w]ork|[r]oot|[h]ome|[o]pt)/\w",
}


def foreign_text(text: str) -> list[str]:
    """Each line that names what only one machine or one day knows, with what it names."""
    lines = text.splitlines()
    found = [
        (number, what)
        for number, line in enumerate(lines, 1)
        for what, it in FOREIGN.items()
        if re.search(it, line)
    ]
    return [f"{number}: names {what}" for number, what in found]


def commands_of(page: str) -> list[str]:
    """The command lines in the fenced blocks of a page, prompts, comments and continuation lines taken care of."""
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE
    )
    lines = [
        line.strip().removeprefix("$ ")
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def paths_of(command: str) -> list[str]:
    """The files of this repository that a command line names."""
    return re.findall(
        r"(?<![\w./-])(?:scripts|examples|configs|benchmarks|docs)/[\w./-]*\w", command
    )


def read_configuration(name: str) -> None:
    """Reads a YAML file of the repository as the command does that it is written for."""
    section = next(reader for pattern, reader in READERS if re.fullmatch(pattern, name))
    # Imported here, so that the other rules are tested even when this import fails.
    if section == "Config":
        import_module("quadriga.config").load_config(files=[REPOSITORY / name])
    else:
        multi_turn = import_module("quadriga.config.multi_turn")
        multi_turn.read_tool_file(str(REPOSITORY / name), getattr(multi_turn, section))


def subcommand_of(command: str) -> str | None:
    """`train` of `.venv/bin/quadriga train a=b`."""
    match = re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?quadriga (\w+)", command)
    return match.group(1) if match else None


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_file_loads(name: str) -> None:
    """Every configuration file in the repository has only keys that exist, with values that they take."""
    read_configuration(name)


def test_there_are_configurations() -> None:
    """The test above has something to read."""
    for pattern, reader in READERS:
        assert any(re.fullmatch(pattern, name) for name in CONFIGS), (
            f"there is no file for {reader}"
        )


@pytest.mark.parametrize("name", PAGES)
def test_commands_name_files_that_exist(name: str) -> None:
    """What a page tells the reader to run is there."""
    page = (REPOSITORY / name).read_text(encoding="utf-8")
    missing = [
        path
        for command in commands_of(page)
        for path in paths_of(command)
        if not (REPOSITORY / path).exists()
    ]
    assert not missing, f"{name} shows commands with files that do not exist: {missing}"


def test_commands_are_commands_of_the_program() -> None:
    """Each `quadriga COMMAND` on a page is one that `quadriga --help` lists."""
    program = [sys.executable, "-c", "from quadriga.cli.main import main; main()", "--help"]
    printed = subprocess.run(
        program, cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout
    listed = set(re.findall(r"\w+", printed))
    shown = {
        (name, word)
        for name in PAGES
        for command in commands_of((REPOSITORY / name).read_text(encoding="utf-8"))
        if (word := subcommand_of(command))
    }
    unknown = sorted((name, word) for name, word in shown if word not in listed)
    assert not unknown, f"these pages show commands that `quadriga --help` does not list: {unknown}"


def anchors_of(page: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page, repeated headings aside."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken_links(name: str) -> list[str]:
    """Relative links of a page, picture or text, whose file or heading does not exist."""
    page = REPOSITORY / name
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())
    broken = []
    for target, anchor in links:
        linked = page.parent / target if target else page
        if not linked.exists():
            broken.append(target)
        elif anchor and linked.suffix == ".md" and anchor not in anchors_of(linked.read_text()):
            broken.append(f"{target}#{anchor}")
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    """A relative link of a page leads to a file and a heading that exist."""
    assert not broken_links(name)


def test_anchors_of_headings() -> None:
    """Punctuation goes, spaces become hyphens, code blocks have no headings."""
    page = "# A `b.c`: d/e\n```bash\n# no heading\n```\n## The model's [x](y.md)\n"
    assert anchors_of(page) == {"a-bc-de", "the-models-x"}


def cells_of(page: str) -> list[str]:
    """The cells of the tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)]


@pytest.mark.parametrize("name", PAGES)
def test_cells_are_short(name: str) -> None:
    """Text that is longer than a cell stands below its table."""
    limit = 12 if name == "docs/verified.md" else 30
    cells = cells_of((REPOSITORY / name).read_text(encoding="utf-8"))
    assert [cell for cell in cells if len(cell.split()) > limit] == []


def test_number_of_pages() -> None:
    """The documentation stays small enough to be true."""
    pages = [
        name
        for name in PAGES
        if re.fullmatch(r"docs/(?!README)\w+\.md", name)
        and not (REPOSITORY / name).read_text(encoding="utf-8").startswith("<!-- generated")
    ]
    assert len(pages) <= MAX_DOC_PAGES, (
        f"{len(pages)} pages in docs/, at most {MAX_DOC_PAGES}: {pages}"
    )
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(contributing.splitlines()) < MAX_CONTRIBUTING_LINES


def test_text_fits_any_machine() -> None:
    """No tracked text names a registry's host, a path of one machine, or how the work was done."""
    complaints = []
    for name in tracked_files():
        path = REPOSITORY / name
        if path.stat().st_size <= MAX_TEXT_BYTES and b"\0" not in (data := path.read_bytes()):
            complaints += [
                f"{name}:{line}" for line in foreign_text(data.decode("utf-8", errors="replace"))
            ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    "text",
    [
        "see https://packages.example" + "/simple",
        "https://regis" + "try.example",
        "cd /wo" + "rk/main",
        "`/ro" + "ot/x`",
        "/ho" + "me/me/venv",
    ],
)
def test_foreign_text_is_found(text: str) -> None:
    """The rule about text finds what it looks for."""
    assert foreign_text(f"a\n{text}\n")[0].startswith("2: ")


@pytest.mark.parametrize(
    "text", ["https://arxiv.org/abs/2409.19256", "quadriga/workers/opt/x.py", "a framework/paper"]
)
def test_other_text_is_not(text: str) -> None:
    """The rule about text leaves ordinary text in peace."""
    assert foreign_text(text) == []


def test_commands_are_read_from_pages() -> None:
    """The reader of pages finds commands, their files and the program's subcommands, and nothing in other blocks."""
    shell = (
        "```bash\n# a comment\n$ scripts/test \\\n  tests/unit\n.venv/bin/quadriga train a=b\n```\n"
    )
    page = f"x\n{shell}```python\nimport x\n```\n"
    commands = commands_of(page)
    assert commands == ["scripts/test    tests/unit", ".venv/bin/quadriga train a=b"]
    assert paths_of(commands[0]) == ["scripts/test"]
    assert [subcommand_of(command) for command in commands] == [None, "train"]


def test_scripts_are_executable() -> None:
    """Whoever clones the repository can run its scripts, and each names its licence."""
    scripts = [name for name in tracked_files() if re.fullmatch(r"scripts/\w+|\.ci/run", name)]
    assert {
        ".ci/run",
        "scripts/check",
        "scripts/install",
        "scripts/quickstart",
        "scripts/test",
    } <= set(scripts)
    for name in scripts:
        text = Path(REPOSITORY / name).read_text(encoding="utf-8")
        assert os.access(REPOSITORY / name, os.X_OK), f"{name} is not executable"
        assert text.splitlines()[1] == "# SPDX-License-Identifier: Apache-2.0", name


def test_time_limits_inside_a_test_are_shorter_than_its_own() -> None:
    """`scripts/test` ends a test after `TEST_S`; what hangs on purpose hangs for longer."""
    (seconds,) = re.findall(
        r"--timeout=(\d+)", (REPOSITORY / "scripts/test").read_text(encoding="utf-8")
    )
    assert int(seconds) == limits.TEST_S
    inner = {
        name: value
        for name, value in vars(limits).items()
        if name.endswith("_S") and name != "TEST_S"
    }
    assert inner.pop("HANGS_S") > limits.TEST_S
    assert max(inner.values()) < limits.TEST_S


def test_test_folders_are_no_packages() -> None:
    """Tests are found by their path (`--import-mode=importlib`); an `__init__.py` would make two of them one module."""
    assert [
        name
        for name in tracked_files()
        if name.startswith("tests/") and name.endswith("__init__.py")
    ] == []


def test_what_is_rehearsed_has_a_test() -> None:
    """In the tables of docs/verified.md: what was rehearsed, how, and the names of tests that exist."""
    page = (REPOSITORY / "docs/verified.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    features = [row for row in rows if len(row) == 6 and row[0].strip(" -") not in ("", "feature")]
    rehearsals = [row[4].strip() for row in features if row[4].strip()]
    names = set()
    for folder in ("gpu", "rehearsal", "rehearsal_cuda"):
        for file in (REPOSITORY / "tests" / folder).glob("*.py"):
            names |= set(re.findall(r"^def (test_\w+)", file.read_text(), flags=re.MULTILINE))
    assert len(rehearsals) > 15
    for rehearsal in rehearsals:
        for part in rehearsal.split("; "):
            assert re.match("(stand-in|fake tensors|kernels): `", part), rehearsal
        assert set(re.findall("`(test_[^`]+)`", rehearsal)) <= names, rehearsal


def test_known_faults_still_apply() -> None:
    """Each patch of tests/rehearsal/faults fits the sources, and names a check that exists."""
    if shutil.which("patch") is None:
        pytest.skip("there is no program `patch` here")
    patches = sorted((REPOSITORY / "tests/rehearsal/faults").glob("*.patch"))
    assert len(patches) > 30
    for patch in patches:
        done = subprocess.run(
            ["patch", "-p1", "-f", "--dry-run", "-i", str(patch)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{patch.stem}: {done.stdout}"
        check = patch.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]
        file, _, name = check.partition("::")
        assert f"def {name}(" in (REPOSITORY / file).read_text(encoding="utf-8"), check
