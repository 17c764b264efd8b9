"""Rota's choice of victims beside others, on a month that is made up from a seed.

Equal slots first, then the whole scheduler in virtual time. Only counts and orders are asserted.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from rota.core.types import Eviction
from rota.sim.replay import BARE, IN_SERVICE, Replayed, Terms, replay
from rota.sim.slots import Clairvoyant, GreedyDual, OneRate, Ours, Policy, Recency, swaps
from rota.sim.traffic import (
    HOUR_MS,
    Ask,
    make_up_loads,
    make_up_traffic,
    names_of,
    read_loads,
    read_traffic,
)

MONTH = make_up_traffic(seed=1)
LOADS_MS = make_up_loads(seed=1)


def count(slot_count: int, policy: Policy, traffic: list[Ask] = MONTH) -> int:
    return sum(swaps(traffic, slot_count, policy))


@pytest.mark.parametrize("slot_count", [2, 4, 8, 16])
def test_the_least_likely_to_be_missed_costs_fewer_swaps_than_the_least_recent(
    slot_count: int,
) -> None:
    """By more than a twentieth, than one rate too; and nobody beats who knows the future."""
    ours = count(slot_count, Ours())
    assert ours < 0.95 * count(slot_count, Recency())
    assert ours < count(slot_count, OneRate())
    assert ours <= count(slot_count, GreedyDual())
    assert ours > count(slot_count, Clairvoyant(MONTH))


@pytest.mark.parametrize("seed", [2, 3])
def test_so_it_is_in_other_months(seed: int) -> None:
    month = make_up_traffic(seed)
    assert count(4, Ours(), month) < 0.95 * count(4, Recency(), month)


def test_a_month_has_the_shape_it_was_fitted_to() -> None:
    names = [ask.model for ask in MONTH]
    changes = sum(before != after for before, after in pairwise(names))
    assert 0.70 < changes / len(MONTH) < 0.80
    assert 0.25 < max(names.count(name) for name in set(names)) / len(MONTH) < 0.35
    assert 25_000 < len(MONTH) < 30_000
    assert make_up_traffic(seed=1) == MONTH
    assert make_up_traffic(seed=2) != MONTH


MORNING = [ask for ask in MONTH if 4 * 24 + 4 <= ask.at_ms // HOUR_MS < 4 * 24 + 6]
"""Two busy hours of a working day."""


def replayed(eviction: Eviction, terms: Terms) -> Replayed:
    random = Random(1)
    return replay(MORNING, 2, lambda _: random.choice(LOADS_MS), eviction, terms)


@pytest.mark.parametrize("terms", [BARE, IN_SERVICE], ids=["bare", "in service"])
def test_a_morning_is_replayed_whole_and_twice_alike(terms: Terms) -> None:
    found = replayed(Eviction.VALUE, terms)
    assert found.requests == len(MORNING) == len(found.waits_ms)
    assert len(names_of(MORNING)) <= found.starts < found.requests
    assert all(wait_ms >= 0 for wait_ms in found.waits_ms)
    assert replayed(Eviction.VALUE, terms) == found
    assert replayed(Eviction.LRU, terms) != found


def test_traffic_and_loads_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "traffic.csv").write_text("at,model,service\n7,b,2.5\n0,a,1\n")
    (tmp_path / "loads.csv").write_text("load\n1.5\n20\n")
    assert read_traffic(tmp_path / "traffic.csv") == [Ask(0, "a", 1_000), Ask(7_000, "b", 2_500)]
    assert read_loads(tmp_path / "loads.csv") == [1_500, 20_000]
    (tmp_path / "traffic.csv").write_text("at,model,service\n7,b\n")
    with pytest.raises(ValueError, match="not enough values"):
        read_traffic(tmp_path / "traffic.csv")
