"""Web sockets of the fake engine: an echo that can also be told to misbehave.

A frame is echoed as it came, so what its sender split stays split. A text frame may be an
order instead: `close CODE REASON`, `ping`, `send BYTES` (that many at once), `half` (half a
frame, then the end of the connection), `end` (the end without a close), `die` (of the process).
"""

from __future__ import annotations

import os
import socket
from typing import Any

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x1, 0x2, 0x8, 0x9, 0xA


def is_wanted(headers: dict[str, str]) -> bool:
    return headers.get("upgrade", "").lower() == "websocket"


def serve(connection: socket.socket, reader: Any, headers: dict[str, str]) -> None:
    """Answer the request to upgrade, then echo until either side ends it.

    Of the sub-protocols offered, the last is taken.
    """
    import base64
    import hashlib  # here: rarely needed, and every start of an engine would pay for it

    key = headers.get("sec-websocket-key", "").encode()
    accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())  # noqa: S324 - as the RFC says
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade"]
    lines.append(b"Sec-WebSocket-Accept: " + accept)
    offered = headers.get("sec-websocket-protocol", "")
    if offered:
        lines.append(b"Sec-WebSocket-Protocol: " + offered.rpartition(",")[2].strip().encode())
    connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
    while _answer(connection, *_read_frame(reader)):
        pass


def _answer(connection: socket.socket, first: int, payload: bytes) -> bool:
    """Whether there is more to come."""
    opcode = first & 0x0F
    text = payload.decode("utf-8", "replace") if opcode == _TEXT else ""
    order, _, rest = text.partition(" ")
    if opcode == _CLOSE:
        connection.sendall(_frame(0x80 | _CLOSE, payload))
        return False
    if opcode == _PING:
        connection.sendall(_frame(0x80 | _PONG, payload))
    elif opcode == _PONG:
        pass
    elif order == "close":
        code, _, reason = rest.partition(" ")
        connection.sendall(_frame(0x80 | _CLOSE, int(code).to_bytes(2, "big") + reason.encode()))
    elif order == "ping":
        connection.sendall(_frame(0x80 | _PING, b"still there?"))
    elif order == "send":
        connection.sendall(_frame(0x80 | _BINARY, bytes(int(rest))))
    elif order == "half":
        connection.sendall(_frame(0x80 | _TEXT, b"a whole one")[:5])
        return False
    elif order == "end":
        return False
    elif order == "die":
        os._exit(3)
    else:
        connection.sendall(_frame(first, payload))
    return True


def _read_frame(reader: Any) -> tuple[int, bytes]:
    """The first byte of a frame and its payload. Raises EOFError: there is none."""
    first, second = _read(reader, 2)
    size = second & 0x7F
    if size == 126:
        size = int.from_bytes(_read(reader, 2), "big")
    elif size == 127:
        size = int.from_bytes(_read(reader, 8), "big")
    mask = _read(reader, 4) if second & 0x80 else b"\0\0\0\0"
    payload = _read(reader, size)
    mask *= size // 4 + 1
    mixed = int.from_bytes(payload, "big") ^ int.from_bytes(mask[:size], "big")
    return first, mixed.to_bytes(size, "big")


def _read(reader: Any, count: int) -> bytes:
    data: bytes = reader.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _frame(first: int, payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        head = bytes([first, size])
    elif size < 65_536:
        head = bytes([first, 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([first, 127]) + size.to_bytes(8, "big")
    return head + payload
