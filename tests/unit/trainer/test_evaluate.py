# SPDX-License-Identifier: Apache-2.0
"""The journal of `quadriga generate --output`."""

from pathlib import Path

import pytest

from quadriga.config import Config, load_config
from quadriga.trainer.evaluate import open_journal
from quadriga.trainer.run_lock import is_held
from quadriga.trainer.settings import RunSettings


def test_settings_are_computed_before_the_lock_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums of large files take long: meanwhile another process is not kept from the output."""
    held = []
    compute = RunSettings.of

    def note(config: Config) -> RunSettings:
        held.append(is_held(tmp_path / "out.parquet.part"))
        return compute(config)

    monkeypatch.setattr(RunSettings, "of", note)
    with open_journal(tmp_path / "out.parquet", load_config([]).config) as journal:
        assert is_held(journal.folder)
    assert held == [False]
