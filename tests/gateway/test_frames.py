"""Frames are followed by their heads, however the bytes of a web socket are cut.
How: frames as a well-known library makes them, cut everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Close, Frame, Opcode

from rota.gateway.frames import Frames, close_frame

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536)


def bytes_of(opcode: Opcode, size: int, *, mask: bool) -> bytes:
    return Frame(opcode, bytes(size)).serialize(mask=mask)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1_000, 10**6])
def test_the_end_of_a_frame_is_known(size: int, cut: int, mask: bool) -> None:
    data = bytes_of(Opcode.BINARY, size, mask=mask)
    frames = Frames()
    for start in range(0, len(data), cut):
        assert start == 0 or not frames.is_between
        has_work = frames.read(data[start : start + cut])
        frames.passed()
    assert frames.is_between
    assert has_work
    assert not frames.has_closed


def test_pings_are_no_work_and_a_close_is_seen() -> None:
    frames = Frames()
    assert not frames.read(bytes_of(Opcode.PING, 5, mask=True))
    assert not frames.read(bytes_of(Opcode.PONG, 0, mask=True))
    assert frames.read(bytes_of(Opcode.PING, 5, mask=True) + bytes_of(Opcode.CONT, 0, mask=True))
    assert not frames.read(Frame(Opcode.CLOSE, Close(1000, "").serialize()).serialize(mask=True))
    assert not frames.has_closed
    frames.passed()
    assert frames.has_closed


@given(st.binary(max_size=200), st.integers(1, 9))
def test_any_bytes_can_be_read(data: bytes, cut: int) -> None:
    whole, parts = Frames(), Frames()
    has_work = whole.read(data)
    seen = [parts.read(data[at : at + cut]) for at in range(0, len(data), cut)]
    assert any(seen) == has_work
    whole.passed()
    parts.passed()
    assert (whole.is_between, whole.has_closed) == (parts.is_between, parts.has_closed)


@pytest.mark.parametrize("reason", ["", "gone", "é" * 100])
def test_a_close_of_ours_is_one_of_theirs(reason: str) -> None:
    data = close_frame(1012, reason)
    assert data[:2] == bytes([0x88, len(data) - 2])
    close = Close.parse(data[2:])
    assert close.code == 1012
    assert reason.startswith(close.reason)
    assert len(data) <= 127
