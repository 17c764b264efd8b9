"""How often a model is expected to be wanted, and what its absence costs.

Histories are written by hand and asked at chosen times; all figures are exact or bounded.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.worth import HOUR_MS, LOAD_MS_MIN, LOAD_MS_UNKNOWN, History, loss_ms, reload_ms

DAY_MS = 24 * HOUR_MS


def wanted(*at_ms: int) -> History:
    history = History()
    for now_ms in at_ms:
        history.note(now_ms)
    return history


def test_what_was_never_wanted_is_not_expected() -> None:
    assert History().per_hour(DAY_MS) == 0.0


@pytest.mark.parametrize("an_hour", [1, 10, 60])
def test_steady_traffic_is_expected_at_its_own_rate(an_hour: int) -> None:
    """Four weeks fill the slowest clock to fifteen sixteenths. Asked on the average: a clock that
    is faster than the traffic has just jumped, or has run out."""
    history = wanted(*range(0, 28 * DAY_MS, HOUR_MS // an_hour))
    step_ms = HOUR_MS // an_hour // 100
    known = [history.per_hour(history.noted_ms + n * step_ms) for n in range(100)]
    assert sum(known) / 100 == pytest.approx(an_hour, rel=0.1)


def test_of_two_that_were_wanted_once_the_later_is_expected_sooner() -> None:
    at_ms = (0, 1_000, 60_000, HOUR_MS, DAY_MS)
    known = [wanted(ms).per_hour(DAY_MS) for ms in at_ms]
    assert all(before < after for before, after in pairwise(known))


def test_a_single_request_is_expected_again_about_as_its_age_falls_back() -> None:
    """Ten times the age, about a tenth of the rate, from minutes to days."""
    known = [wanted(0).per_hour(age_ms) for age_ms in (120_000, 1_200_000, 12_000_000, 120_000_000)]
    for before, after in pairwise(known):
        assert 7 < before / after < 13


def test_a_habit_outweighs_one_late_request_and_a_burst_does_not_for_long() -> None:
    habit = wanted(*range(0, 2 * DAY_MS, HOUR_MS // 4))
    burst = wanted(*(2 * DAY_MS + n * 1_000 for n in range(20)))
    assert burst.per_hour(2 * DAY_MS + 60_000) > habit.per_hour(2 * DAY_MS + 60_000)
    assert burst.per_hour(2 * DAY_MS + 6 * HOUR_MS) < habit.per_hour(2 * DAY_MS + 6 * HOUR_MS)


def test_a_load_of_unknown_length_is_an_ordinary_one_and_none_is_free() -> None:
    assert reload_ms(None) == LOAD_MS_UNKNOWN
    assert reload_ms(5) == LOAD_MS_MIN
    history = wanted(0)
    assert loss_ms(history, 40_000, 9) == pytest.approx(2 * loss_ms(history, None, 9))


@given(st.lists(st.integers(0, 10 * DAY_MS), min_size=1), st.integers(0, 400 * DAY_MS))
def test_a_rate_only_falls_until_the_next_request_and_rises_then(
    at_ms: list[int], later_ms: int
) -> None:
    history, now_ms = wanted(*sorted(at_ms)), max(at_ms) + later_ms
    before = history.per_hour(now_ms)
    assert 0 <= before <= history.per_hour(max(at_ms))
    history.note(now_ms)
    assert history.per_hour(now_ms) > before
