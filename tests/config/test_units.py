"""Durations, memory and numbers, as people write them.

How: tables of texts, each with its value or the remedy that its refusal names.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.config import units


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("500ms", 500),
        ("10s", 10_000),
        ("1.5s", 1_500),
        ("10m", 600_000),
        ("1h30m", 5_400_000),
        ("2d", 172_800_000),
        ("0s", 0),
    ],
)
def test_duration(text: str, ms: int) -> None:
    assert units.duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("10", "say 10s or 10m"),
        ("10 minutes", "like 500ms, 10s"),
        ("-5s", "like 500ms, 10s"),
        ("", "like 500ms, 10s"),
        ("1e3s", "like 500ms, 10s"),
        ("٣s", "like 500ms, 10s"),
        ("999999d", "longer than a year"),
        ("9" * 5000 + "s", "like 500ms, 10s"),
    ],
)
def test_no_duration(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        units.duration_ms(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("24GB", 24_000_000_000),
        ("1TiB", 1 << 40),
        ("100B", 100),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert units.memory_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("24G", "say 24GiB or 24GB"),
        ("24Gi", "say 24GiB or 24GB"),
        ("8", "say 8GiB or 8MiB"),
        ("8 apples", "known are B, KiB"),
        ("much", "like 8GiB"),
        ("-1GiB", "like 8GiB"),
        ("9999999999TiB", "more than any machine"),
    ],
)
def test_no_memory(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        units.memory_bytes(text)


@pytest.mark.parametrize("text", ["1.0", "1e3", "0x10", "1_000", "", " 1", "٣", "9" * 5000])
def test_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        units.whole(text)


@pytest.mark.parametrize("text", ["yes", "on", "1", ""])
def test_no_truth(text: str) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        units.truth(text)


@given(st.integers(0, units.DURATION_MS_MAX))
def test_a_shown_duration_reads_back(ms: int) -> None:
    assert units.duration_ms(units.show_duration(ms)) == ms


def test_shown_memory() -> None:
    assert [units.show_mib(mib) for mib in (0, 512, 1024, 7680)] == [
        "0 MiB",
        "512 MiB",
        "1 GiB",
        "7.5 GiB",
    ]
