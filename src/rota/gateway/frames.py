"""Following the frames of a web socket (RFC 6455, 5.2) as they pass, by their heads alone.

rota passes a web socket's bytes on as they are, so that whatever the two ends have agreed upon
(sub-protocols, compression, sizes, when to ping) needs no word from it. All it must know is
whether what passes is work or a ping, and whether it could put in a frame of its own.
"""

from __future__ import annotations

_CLOSE = 0x8
_CONTROL = 0x8  # the bit that closes, pings and pongs have in common
REASON_BYTES_MAX = 123  # a control frame has 125, two are the code's

# By the second byte of a head: how long the head is, and the whole frame if it is a short one
# (else 0). Looked up, for a peer may send nothing but short ones, 32,000 in a piece.
_HEAD_BYTES = tuple(
    2 + {126: 2, 127: 8}.get(second & 0x7F, 0) + (4 if second & 0x80 else 0)
    for second in range(256)
)
_SHORT_BYTES = tuple(
    head + (second & 0x7F) if second & 0x7F < 126 else 0 for second, head in enumerate(_HEAD_BYTES)
)


class Frames:
    """One direction of a web socket.

    Attributes:
        is_between: whether what has been passed on ends where a frame does.
        has_closed: whether a close has been passed on.
    """

    __slots__ = ("_has_closed", "_head", "_is_work", "_left", "has_closed", "is_between")

    def __init__(self) -> None:
        self.is_between = True
        self.has_closed = False
        self._has_closed = False
        self._head = bytearray()  # as far as it has come
        self._left = 0  # bytes of the frame under way
        self._is_work = False

    def read(self, piece: bytes) -> bool:
        """Look at the next piece; whether anything of it belongs to a message."""
        has_work = False
        at = 0
        while at < len(piece):
            if not self._left and not self._head:
                at, is_work = self._read_short(piece, at)
                has_work |= is_work
                if at == len(piece):
                    break
            if self._left:
                step = min(self._left, len(piece) - at)
                self._left -= step
                at += step
                has_work |= self._is_work
            else:
                step = _head_bytes(self._head) - len(self._head)
                self._head += piece[at : at + step]
                at += step
                if len(self._head) == _head_bytes(self._head):
                    self._begin(bytes(self._head))
                    has_work |= self._is_work
                    self._head.clear()
        return has_work

    def _read_short(self, piece: bytes, at: int) -> tuple[int, bool]:
        """Look at whole short frames, as many as follow one another; where they end, and
        whether there was a message among them."""
        has_work = False
        last = len(piece) - 1
        while at < last and (size := _SHORT_BYTES[piece[at + 1]]) and at + size <= last + 1:
            opcode = piece[at] & 0x0F
            if not opcode & _CONTROL:
                has_work = True
            elif opcode == _CLOSE:
                self._has_closed = True
            at += size
        return at, has_work

    def passed(self) -> None:
        """What was read has been passed on."""
        self.is_between = not self._left and not self._head
        self.has_closed = self._has_closed

    def _begin(self, head: bytes) -> None:
        opcode = head[0] & 0x0F
        self._is_work = not opcode & _CONTROL
        self._has_closed = self._has_closed or opcode == _CLOSE
        size = head[1] & 0x7F
        if size == 126:
            size = int.from_bytes(head[2:4], "big")
        elif size == 127:
            size = int.from_bytes(head[2:10], "big")
        self._left = size


def close_frame(code: int, reason: str) -> bytes:
    """A server's close; the reason is cut to what a frame takes."""
    said = reason.encode("utf-8")[:REASON_BYTES_MAX].decode("utf-8", "ignore").encode("utf-8")
    return bytes([0x80 | _CLOSE, 2 + len(said)]) + code.to_bytes(2, "big") + said


def _head_bytes(begun: bytearray) -> int:
    """How long a frame's head is, as far as its beginning tells: it may turn out longer."""
    if len(begun) < 2:
        return 2
    return _HEAD_BYTES[begun[1]]
