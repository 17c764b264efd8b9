"""Memory accounts: booked at Start, free when it is seen free, claims laid over.

Worked cases for `Ledger`.
"""

from __future__ import annotations

import pytest

from rota.core.ledger import Ledger
from rota.core.types import Device, Placement

PAIR = Placement("n", ("a", "b"), (6, 3))


def opened() -> Ledger:
    ledger = Ledger()
    ledger.join("n", (Device("a", 10), Device("b", 10)))
    return ledger


def test_what_is_booked_is_taken_until_it_is_released() -> None:
    ledger = opened()
    ledger.book("r1", PAIR)
    assert [(room.id, room.free) for room in ledger.rooms("n", {})] == [("a", 4), ("b", 7)]
    assert ledger.used_mib(("n", "a")) == 6
    ledger.release("r1", PAIR)
    assert [room.free for room in ledger.rooms("n", {})] == [10, 10]


def test_what_leaves_is_coming_and_not_free() -> None:
    ledger = opened()
    ledger.book("r1", PAIR)
    ledger.leave("r1", PAIR)
    assert [(room.free, room.coming) for room in ledger.rooms("n", {})] == [(4, 6), (7, 3)]
    ledger.release("r1", PAIR)
    assert [(room.free, room.coming) for room in ledger.rooms("n", {})] == [(10, 0), (10, 0)]


def test_claims_come_off_what_is_free() -> None:
    ledger = opened()
    ledger.book("r1", PAIR)
    assert [room.free for room in ledger.rooms("n", {("n", "a"): 6})] == [-2, 7]


def test_a_node_that_joins_again_keeps_what_it_holds() -> None:
    ledger = opened()
    ledger.book("r1", PAIR)
    ledger.join("n", (Device("a", 12), Device("b", 10)))
    assert [room.free for room in ledger.rooms("n", {})] == [6, 7]


def test_booking_twice_is_a_mistake() -> None:
    ledger = opened()
    ledger.book("r1", PAIR)
    with pytest.raises(AssertionError):
        ledger.book("r1", PAIR)
