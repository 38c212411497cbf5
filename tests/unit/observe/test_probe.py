# SPDX-License-Identifier: Apache-2.0
"""The probe tells installed, too old, broken and absent apart. The packages probed are real distributions."""

import pytest

from quadriga.observe.probe import EXTRAS, Extra, _numbers, probe_capabilities


def extra(package: str = "rich", module: str = "rich", least: str = "1.0") -> Extra:
    return Extra(package, module, least, "shows things", "quadriga[x]")


def test_each_state_has_its_reason():
    usable, absent, old, broken = probe_capabilities(
        [
            extra(),
            extra(package="surely-not-a-package"),
            extra(least="9999"),
            extra(module="rich.surely_not_a_module"),
        ]
    )
    assert usable.is_usable and usable.version and usable.reason == "imports"
    assert not absent.is_usable and absent.version == "" and absent.reason == "not installed; pip install 'quadriga[x]'"
    assert not old.is_usable and "9999 or later" in old.reason
    assert not broken.is_usable and "No module named 'rich.surely_not_a_module'" in broken.reason


def test_an_import_that_hangs_is_given_up():
    (hanging,) = probe_capabilities([extra(module="time; time.sleep(60)")], timeout_s=0.3)
    assert not hanging.is_usable
    assert "took more than" in hanging.reason


def test_every_extra_says_what_it_is_for_and_how_to_get_it():
    assert all(extra.purpose and extra.install.startswith("quadriga[") for extra in EXTRAS)
    assert len({extra.package for extra in EXTRAS}) == len(EXTRAS)


@pytest.mark.parametrize(("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.32.0rc1", (0, 32, 0)), ("dev", ())])
def test_versions_compare_by_number(text, numbers):
    assert _numbers(text) == numbers
    assert _numbers("0.9") < _numbers("0.10")
