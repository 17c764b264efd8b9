"""Where a replica goes: best fit, on devices it may use, all of them on one node.

Worked cases for the pure functions of `placement`.
"""

from __future__ import annotations

from rota.core.placement import could_ever_fit, place
from rota.core.types import Device, Placement
from tests.core.makers import model, rooms


def test_it_goes_into_the_tightest_gap() -> None:
    placed = place(model(memory_mib=4), "n", rooms(a=(10, 10), b=(5, 10), c=(3, 10)))
    assert placed == Placement("n", ("b",), (4,))


def test_a_tie_goes_to_the_device_stated_first() -> None:
    assert place(model(memory_mib=4), "n", rooms(a=(6, 10), b=(6, 20))) == Placement(
        "n", ("a",), (4,)
    )


def test_an_unknown_footprint_takes_an_empty_device_whole() -> None:
    whole = model(memory_mib=None)
    assert place(whole, "n", rooms(a=(9, 10), b=(20, 20))) == Placement("n", ("b",), (20,))
    assert place(whole, "n", rooms(a=(9, 10))) is None


def test_several_devices_are_taken_together_in_their_stated_order() -> None:
    pair = model(memory_mib=4, count=2)
    placed = place(pair, "n", rooms(a=(10, 10), b=(3, 10), c=(5, 10)))
    assert placed == Placement("n", ("a", "c"), (4, 4))
    assert place(pair, "n", rooms(a=(10, 10), b=(3, 10))) is None


def test_only_devices_it_may_use_count() -> None:
    bound = model(memory_mib=4, devices=frozenset({"b"}))
    assert place(bound, "n", rooms(a=(10, 10), b=(6, 10))) == Placement("n", ("b",), (4,))
    assert place(bound, "n", rooms(a=(10, 10), b=(3, 10))) is None


def test_claimed_memory_that_is_still_on_its_way_is_not_free() -> None:
    assert place(model(memory_mib=1), "n", rooms(a=(-2, 10))) is None


def test_whether_it_could_ever_fit_asks_for_the_totals() -> None:
    devices = [Device("a", 10), Device("b", 4)]
    assert could_ever_fit(model(memory_mib=10), devices)
    assert not could_ever_fit(model(memory_mib=11), devices)
    assert not could_ever_fit(model(memory_mib=10, count=2), devices)
    assert not could_ever_fit(model(memory_mib=5, devices=frozenset({"b"})), devices)
    assert could_ever_fit(model(memory_mib=None, count=2), devices)
    assert could_ever_fit(model(count=0), [])
