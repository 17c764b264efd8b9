"""Whether replicas can stand together on stated devices: a small exact search.

Used for what must always run. Totals alone would say yes to two models of 6 GiB on two cards
of 4 and 8 GiB; placing greedily would say no to mixes that do fit. The number of such replicas
is small, so the search is exact; past a bound on its steps it says yes, since only a certain
no may refuse someone's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from rota.config.units import show_mib
from rota.core.types import Model

STEPS_MAX = 20_000
REPLICAS_MAX = 200


@dataclass(frozen=True, slots=True)
class Want:
    """One replica to place.

    Args:
        memory_mib: on each of its devices; None = it takes them whole.
        device_count: devices it needs.
        devices: ids it may be placed on; None = any.
    """

    memory_mib: int | None
    device_count: int = 1
    devices: frozenset[str] | None = None


def fits(wants: Sequence[Want], totals_mib: Mapping[str, int]) -> bool:
    """Whether all can be placed at once. False is certain; True may be a bounded search's."""
    if len(wants) > REPLICAS_MAX:
        return True
    return _Search(wants, totals_mib).run()


def want_of(model: Model) -> Want:
    """What a replica of a model has to be given."""
    return Want(model.memory_mib, model.device_count, model.devices)


def needs_of(model: Model) -> str:
    """What a replica of a model takes, in words."""
    amount = "a whole device" if model.memory_mib is None else show_mib(model.memory_mib)
    return amount if model.device_count == 1 else f"{amount} on each of {model.device_count}"


class _Search:
    def __init__(self, wants: Sequence[Want], totals_mib: Mapping[str, int]) -> None:
        largest = max(totals_mib.values(), default=0)
        self.totals = totals_mib
        self.free = dict(totals_mib)
        self.steps = 0
        # The hardest to place first, so that a dead end is met early.
        self.wants = sorted(
            wants,
            key=lambda want: (
                -want.device_count,
                -(largest if want.memory_mib is None else want.memory_mib),
                len(totals_mib if want.devices is None else want.devices),
            ),
        )

    def run(self) -> bool:
        return self._place(0)

    def _place(self, index: int) -> bool:
        if index == len(self.wants):
            return True
        want = self.wants[index]
        tried: set[tuple[tuple[int, int, int], ...]] = set()
        for devices in combinations(self._candidates(want), want.device_count):
            self.steps += 1
            if self.steps > STEPS_MAX:
                return True
            shape = tuple(sorted(self._shape(device, index) for device in devices))
            if shape in tried:  # the same choice under other names
                continue
            tried.add(shape)
            if self._place_on(devices, index):
                return True
        return False

    def _place_on(self, devices: tuple[str, ...], index: int) -> bool:
        before = {device: self.free[device] for device in devices}
        for device in devices:
            need = self.wants[index].memory_mib
            self.free[device] -= self.free[device] if need is None else need
        fitted = self._place(index + 1)
        self.free.update(before)
        return fitted

    def _candidates(self, want: Want) -> list[str]:
        return [device for device in self.free if self._takes(device, want)]

    def _takes(self, device: str, want: Want) -> bool:
        if want.devices is not None and device not in want.devices:
            return False
        if want.memory_mib is None:
            return self.free[device] == self.totals[device]
        return self.free[device] >= want.memory_mib

    def _shape(self, device: str, index: int) -> tuple[int, int, int]:
        """What tells a device from another, for the replicas still to place."""
        allowed = sum(
            1 << n
            for n, want in enumerate(self.wants[index:])
            if want.devices is None or device in want.devices
        )
        return self.free[device], self.totals[device], allowed
