"""What is to happen when, in virtual time: the one place where the future is kept."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Happening = Callable[[], None]


class Timeline:
    """A clock that jumps from one happening to the next; ties go first come, first served."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._count = 0
        self._ahead: list[tuple[int, int, Happening]] = []

    def post(self, in_ms: int, happening: Happening) -> None:
        """Have something happen after `in_ms` from now."""
        assert in_ms >= 0, in_ms
        self._count += 1
        heapq.heappush(self._ahead, (self.now_ms + in_ms, self._count, happening))

    def next_ms(self) -> int | None:
        """When something happens next; None = nothing is ahead."""
        return self._ahead[0][0] if self._ahead else None

    def jump(self) -> None:
        """Let the next thing happen."""
        self.now_ms, _, happening = heapq.heappop(self._ahead)
        happening()
