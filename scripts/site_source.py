# SPDX-License-Identifier: Apache-2.0
"""Copies the pages and the files that they link to into outputs/site/source; `scripts/docs` calls it.

The copies lie as in the repository, so that relative links hold. A link to a folder, which a site
cannot show, becomes its text. A link to nothing stays, for mkdocs to report.
"""

import re
import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "outputs" / "site" / "source"
# Packages of the reference of the code; mkdocs.yml lists the same.
REFERENCE = (
    "api config algorithms protocol data rewards rollout engines models weight_sync"
    " single_controller workers trainer"
)
LINK = re.compile(r"(?P<text>\[[^\[\]]*\])\((?P<target>[^()#\s]+)(?P<anchor>#[^()\s]*)?\)")


def copy_page(page: Path) -> None:
    """Copy a page and the files that it links to, and drop its links to folders."""

    def without_folders(link: re.Match[str]) -> str:
        linked = (page.parent / link["target"]).resolve()
        if linked.is_dir():
            return link["text"][1:-1]
        if linked.is_file() and linked.suffix != ".md":
            copy_to = SOURCE / linked.relative_to(REPOSITORY)
            copy_to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, copy_to)
        return link[0]

    copy = SOURCE / page.relative_to(REPOSITORY)
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = page.read_text(encoding="utf-8")
    copy.write_text(LINK.sub(without_folders, text), encoding="utf-8")


def main() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")):
        copy_page(page)
    (SOURCE / "reference").mkdir()
    for name in REFERENCE.split():
        page = SOURCE / "reference" / f"{name}.md"
        page.write_text(f"::: quadriga.{name}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
