# SPDX-License-Identifier: Apache-2.0
"""All worker groups of a run in one process."""

from quadriga.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from quadriga.single_controller.team import LocalTeam


class Counter(Worker):
    """Counts how often it is closed, in a list of the test's."""

    def __init__(self, closed: list[str], name: str) -> None:
        self.closed, self.name = closed, name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        self.closed.append(self.name)


class Silent(Worker):
    """Has nothing to release."""


def test_a_group_to_each_role_and_those_are_closed_that_can_be() -> None:
    closed: list[str] = []
    classes = {
        "actor": ClassWithInitArgs(Counter, closed, "actor"),
        "ref": ClassWithInitArgs(Silent),
        "critic": ClassWithInitArgs(Counter, closed, "critic"),
    }
    team = LocalTeam(classes, dict.fromkeys(classes, "all"), {"all": [1]}, "cpu")
    assert {role: (group.name, group.world_size) for role, group in team.groups.items()} == {
        "actor": ("actor", 1),
        "ref": ("ref", 1),
        "critic": ("critic", 1),
    }
    assert not team.is_beside
    assert team.describe() == {}
    team.end()
    assert closed == []
    team.close()
    assert closed == ["actor", "critic"]
