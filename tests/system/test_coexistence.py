"""What: who leaves for whom by groups and by a matrix, when memory would hold everybody.
How: a whole rota over fake engines; the machine's own list of processes says what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.coexistence import Coexistence, Group, Groups, Matrix
from tests.system.rig import ALWAYS, Fake, rota, until

ROOM = {"gpu0": 1_000}

# A chat group, tools beside it, one that nobody touches, and one in no group.
GROUPS = Groups(
    (
        Group("chat", frozenset("ab")),
        Group("tools", frozenset("cd"), swap=False, exclusive=False),
        Group("kept", frozenset("e"), exclusive=False, persistent=True),
    )
)
# The sets of llama-swap's documentation, with its costs.
MATRIX = Matrix(
    sets=(("x", "a & c"), ("y", "a & b"), ("z", "(d | b) & e")), costs={"b": 10, "c": 1}
)


@pytest.mark.parametrize(
    ("rules", "asked", "left"),
    [
        (GROUPS, "abcdxea", ["a", "b", "bc", "bcd", "bcdx", "bcdex", "ae"]),
        (MATRIX, "bcadexa", ["b", "c", "ac", "d", "de", "x", "a"]),
    ],
    ids=["groups", "matrix"],
)
async def test_who_is_left_after_each_request(
    tmp_path: Path, rules: Coexistence, asked: str, left: list[str]
) -> None:
    # case W40
    fakes = [Fake(name, memory_mib=100).with_facts(hold_finished_ms=0) for name in "abcdex"]
    async with rota(tmp_path, fakes, ROOM, coexistence=rules) as rig:
        for name, expected in zip(asked, left, strict=True):
            before = set(rig.processes())
            plan = (await rig.http.get(f"/rota/v1/models/{name}/plan")).json()
            assert rig.processes().keys() == before, "asking what would happen changes nothing"
            assert (await rig.chat(name)).status_code == 200
            assert "".join(sorted(rig.processes())) == expected
            assert {out["model"] for out in plan["leaves"]} == before - set(expected)
            if plan["leaves"]:
                assert plan["rule"]


async def test_what_works_is_waited_for_before_it_leaves_by_a_rule(tmp_path: Path) -> None:
    slow = Fake("a", ("--tokens", "20", "--tokens-per-second", "40"), memory_mib=100)
    async with rota(tmp_path, [slow, Fake("b", memory_mib=100)], ROOM, coexistence=GROUPS) as rig:
        async with rig.begun("a") as rest:
            plan = (await rig.http.get("/rota/v1/models/b/plan")).json()
            assert (plan["outcome"], plan["leaves"]) == ("waits", [])
            assert plan["rule"] == "group `chat` swaps"
            assert [line async for line in rest][-2:] == ["data: [DONE]", ""]
        assert (await rig.chat("b")).status_code == 200
        assert rig.processes().keys() == {"b"}


async def test_what_may_not_leave_does_not_leave_by_a_rule_either(tmp_path: Path) -> None:
    kept = Fake("a", memory_mib=100, scaling=ALWAYS)
    async with rota(tmp_path, [kept, Fake("b", memory_mib=100)], ROOM, coexistence=GROUPS) as rig:
        await until(lambda: rig.state("a") == "ready")
        refused = await rig.chat("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
        assert rig.processes().keys() == {"a"}
