# SPDX-License-Identifier: Apache-2.0
"""The probe tells installed, too old, broken and absent apart. The packages probed are real distributions."""

import pytest

from quadriga.observe import probe
from quadriga.observe.probe import EXTRAS, NOT_TRIED, Extra, probe_capabilities, release_numbers


def extra(
    package: str = "rich", module: str = "rich", least: str = "1.0", is_quick: bool = True
) -> Extra:
    return Extra(package, module, least, "shows things", ".[x]", is_quick)


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
    assert (
        not absent.is_usable
        and absent.version == ""
        and absent.reason == "not installed; pip install -e '.[x]'"
    )
    assert not old.is_usable and "9999 or later" in old.reason
    assert not broken.is_usable and "No module named 'rich.surely_not_a_module'" in broken.reason


def test_an_import_that_hangs_is_given_up():
    (hanging,) = probe_capabilities([extra(module="time; time.sleep(60)")], timeout_s=0.3)
    assert not hanging.is_usable
    assert "took more than" in hanging.reason


def test_a_slow_one_is_imported_only_when_all_are():
    slow = extra(module="time; time.sleep(60)", is_quick=False)
    (tried,) = probe_capabilities([slow], timeout_s=0.3, try_all=True)
    assert not tried.is_usable and "took more than" in tried.reason
    (left,) = probe_capabilities([extra(is_quick=False)])
    assert left.is_usable and left.reason == NOT_TRIED and left.version


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("numpy>=1.17,<99", NOT_TRIED),
        ("numpy (>=1.17)", NOT_TRIED),
        ("numpy!=1.0,~=2.0", NOT_TRIED),
        ("numpy<1", f"{NOT_TRIED}: it requires numpy<1, and "),
        ("numpy[extra]>99", f"{NOT_TRIED}: it requires numpy>99, and "),
        (
            "surely-not-a-package",
            f"{NOT_TRIED}: it requires surely-not-a-package, which is not installed",
        ),
        ('surely-not-a-package; sys_platform == "win32"', NOT_TRIED),
    ],
)
def test_what_is_not_tried_is_known_by_what_it_requires(
    monkeypatch: pytest.MonkeyPatch, requirement, reason
):
    monkeypatch.setattr(probe, "requires", {"rich": [requirement]}.get)
    (found,) = probe_capabilities([extra(is_quick=False)])
    assert found.reason.startswith(reason) and found.is_usable == (reason == NOT_TRIED)


def test_a_distribution_without_its_module_is_not_usable():
    (found,) = probe_capabilities([extra(module="surely_not_a_module", is_quick=False)])
    assert (
        not found.is_usable
        and found.reason == f"{NOT_TRIED}: there is no module surely_not_a_module"
    )


def test_every_extra_says_what_it_is_for_and_how_to_get_it():
    assert all(extra.purpose and extra.install.startswith(".[") for extra in EXTRAS)
    assert len({extra.package for extra in EXTRAS}) == len(EXTRAS)


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.32.0rc1", (0, 32, 0)), ("dev", ())]
)
def test_versions_compare_by_number(text, numbers):
    assert release_numbers(text) == numbers
    assert release_numbers("0.9") < release_numbers("0.10")
