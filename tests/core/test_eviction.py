"""Who leaves, and for whom: the cheapest sufficient set.

Worked cases for the planner; whoever changes `eviction.value` changes these. Where no loss is
stated all lose the same, and the least recent use decides.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rota.core.eviction import Candidate, plan
from rota.core.ledger import DeviceRoom
from tests.core.makers import candidate, model, rooms


def test_the_least_recently_used_leaves() -> None:
    found = plan(
        model(memory_mib=4),
        "n",
        rooms(a=(0, 10)),
        [candidate("new", 200, a=5), candidate("old", 100, a=5)],
    )
    assert found is not None
    assert found.victims == ("old",)
    assert found.placement.devices == ("a",)


def test_only_as_many_as_needed_leave() -> None:
    """Two small ones are older, but the large one alone makes room: the small are put back
    only where they turn out not to be in the way."""
    small = [candidate("s1", 1, a=2), candidate("s2", 2, a=2)]
    found = plan(model(memory_mib=6), "n", rooms(a=(0, 10)), [*small, candidate("l", 3, a=6)])
    assert found is not None
    assert found.victims == ("l",)


def test_the_device_where_it_hurts_least_is_cleared() -> None:
    found = plan(
        model(memory_mib=8),
        "n",
        rooms(a=(0, 10), b=(0, 10)),
        [candidate("a1", 50, a=8), candidate("b1", 10, b=4), candidate("b2", 20, b=4)],
    )
    assert found is not None
    assert found.placement.devices == ("b",)
    assert found.victims == ("b1", "b2")


def test_work_is_worth_more_than_any_idle_one() -> None:
    found = plan(
        model(memory_mib=4),
        "n",
        rooms(a=(0, 4), b=(0, 4)),
        [candidate("busy", 1, is_busy=True, a=4), candidate("idle", 999, b=4)],
    )
    assert found is not None
    assert found.victims == ("idle",)


def test_memory_on_its_way_costs_nothing() -> None:
    coming = [DeviceRoom("a", 10, 0, 8), DeviceRoom("b", 10, 0, 0)]
    found = plan(model(memory_mib=8), "n", coming, [candidate("old", 1, b=8)])
    assert found is not None
    assert found.victims == ()
    assert found.placement.devices == ("a",)


def test_a_victim_on_two_devices_clears_both() -> None:
    found = plan(
        model(memory_mib=8, count=2),
        "n",
        rooms(a=(0, 10), b=(0, 10), c=(0, 10)),
        [candidate("pair", 5, a=8, c=8), candidate("b1", 6, b=8)],
    )
    assert found is not None
    assert found.victims == ("pair",)
    assert found.placement.devices == ("a", "c")


def test_the_one_least_likely_to_be_missed_leaves_though_it_was_used_last() -> None:
    found = plan(
        model(memory_mib=4),
        "n",
        rooms(a=(0, 10)),
        [candidate("dear", 100, loss_ms=9.0, a=5), candidate("cheap", 200, loss_ms=1.0, a=5)],
    )
    assert found is not None
    assert found.victims == ("cheap",)


def test_a_loss_counts_by_what_it_frees() -> None:
    """Six small ones would lose less each, and more together than the large one."""
    small = [candidate(f"s{n}", n, loss_ms=2.0, a=2) for n in range(6)]
    found = plan(
        model(memory_mib=12), "n", rooms(a=(0, 24)), [*small, candidate("l", 9, loss_ms=3.0, a=12)]
    )
    assert found is not None
    assert found.victims == ("l",)


def test_one_that_does_alone_goes_rather_than_a_large_one_that_loses_more() -> None:
    """For each MiB the large one is the cheapest; only its half is needed."""
    found = plan(
        model(memory_mib=8),
        "n",
        rooms(a=(0, 24)),
        [candidate("large", 1, loss_ms=9.0, a=16), candidate("small", 2, loss_ms=5.0, a=8)],
    )
    assert found is not None
    assert found.victims == ("small",)


def test_a_small_one_is_not_sacrificed_in_vain() -> None:
    """It is the cheapest and does not suffice; the one that does makes it superfluous."""
    found = plan(
        model(memory_mib=8),
        "n",
        rooms(a=(0, 10)),
        [candidate("small", 1, loss_ms=0.1, a=2), candidate("large", 2, loss_ms=5.0, a=8)],
    )
    assert found is not None
    assert found.victims == ("large",)


def test_devices_compare_by_all_that_is_lost_there() -> None:
    found = plan(
        model(memory_mib=8),
        "n",
        rooms(a=(0, 8), b=(0, 8)),
        [
            candidate("a1", 1, loss_ms=2.0, a=4),
            candidate("a2", 1, loss_ms=2.0, a=4),
            candidate("b1", 9, loss_ms=3.0, b=8),
        ],
    )
    assert found is not None
    assert found.victims == ("b1",)


def test_one_on_two_devices_counts_all_that_it_frees() -> None:
    wide = candidate("wide", 9, loss_ms=5.0, a=8, b=8)
    narrow = [candidate("a1", 1, loss_ms=4.0, a=8), candidate("b1", 2, loss_ms=4.0, b=8)]
    found = plan(model(memory_mib=8, count=2), "n", rooms(a=(0, 16), b=(0, 16)), [wide, *narrow])
    assert found is not None
    assert found.victims == ("wide",)


def test_no_plan_where_all_leaving_is_not_enough() -> None:
    assert plan(model(memory_mib=8), "n", rooms(a=(0, 10)), [candidate("x", 1, a=7)]) is None


@given(
    st.lists(
        st.builds(
            Candidate,
            replica=st.uuids().map(str),
            holds_mib=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1),
            last_use_ms=st.integers(0, 9),
            is_busy=st.booleans(),
            loss_ms=st.sampled_from((0.0, 1.0, 2.5)),
        ),
        max_size=6,
        unique_by=lambda candidate: candidate.replica,
    ),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_a_plan_is_sufficient_and_nobody_in_it_is_superfluous_on_one_device(
    candidates: list[Candidate], need: int, count: int
) -> None:
    taken = {d: sum(c.holds_mib.get(d, 0) for c in candidates) for d in "abc"}
    listed = [DeviceRoom(d, max(12, taken[d]), max(12, taken[d]) - taken[d], 0) for d in "abc"]
    wanted = replace(model(memory_mib=need), device_count=count)
    found = plan(wanted, "n", listed, candidates)
    assert found is not None  # empty devices hold it
    assert len(found.placement.devices) == count

    def fits(victims: set[str]) -> bool:
        free = {room.id: room.free for room in listed}
        for one in candidates:
            if one.replica in victims:
                for device, mib in one.holds_mib.items():
                    free[device] += mib
        return all(free[device] >= need for device in found.placement.devices)

    assert fits(set(found.victims))
    if count == 1:
        assert not any(fits(set(found.victims) - {victim}) for victim in found.victims)
