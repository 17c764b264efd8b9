"""Short ways to make the core's values in tests."""

from __future__ import annotations

from collections.abc import Mapping

from rota.core.coexistence import FREE, Coexistence
from rota.core.effects import Effect, Grant, Refuse, Start, Stop
from rota.core.events import Event, NodeJoined, RequestArrived
from rota.core.eviction import Candidate
from rota.core.invariants import EffectAudit, check
from rota.core.ledger import DeviceRoom
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Model, Scaling


def model(
    name: str = "m",
    memory_mib: int | None = 8,
    *,
    scaling: tuple[int, int] = (0, 1),
    idle_ms: int = 600_000,
    count: int = 1,
    devices: frozenset[str] | None = None,
    slots: int = 1,
    queue_max: int = 1_000,
    patience_ms: int = 300_000,
    load_ms: int | None = None,
) -> Model:
    return Model(
        name=name,
        scaling=Scaling(*scaling, idle_ms),
        memory_mib=memory_mib,
        device_count=count,
        devices=devices,
        slots=slots,
        queue_max=queue_max,
        patience_ms=patience_ms,
        load_ms=load_ms,
    )


def rooms(**free_and_total: tuple[int, int]) -> list[DeviceRoom]:
    """Devices by name: what is free of how much."""
    return [DeviceRoom(name, total, free, 0) for name, (free, total) in free_and_total.items()]


def candidate(
    replica: str,
    last_use_ms: int,
    *,
    is_busy: bool = False,
    loss_ms: float = 0.0,
    **holds_mib: int,
) -> Candidate:
    held: Mapping[str, int] = holds_mib
    return Candidate(replica, held, last_use_ms, is_busy, loss_ms)


class Stage:
    """A scheduler whose every step is checked."""

    def __init__(self, *models: Model, coexistence: Coexistence = FREE, **devices_mib: int) -> None:
        self.now_ms = 0
        self.scheduler = Scheduler(models, coexistence=coexistence)
        self.audit = EffectAudit(models, coexistence)
        self.count = 0
        listed = tuple(Device(name, mib) for name, mib in (devices_mib or {"d0": 10}).items())
        self.feed(NodeJoined("n0", listed))

    def feed(self, event: Event, *, after_ms: int = 0) -> list[Effect]:
        self.now_ms += after_ms
        effects = self.scheduler.step(event, self.now_ms)
        self.audit.watch(event, effects, self.now_ms)
        check(self.scheduler)
        return effects

    def ask(self, name: str, caller: str = "ann", *, after_ms: int = 0) -> list[Effect]:
        self.count += 1
        return self.feed(RequestArrived(f"q{self.count}", name, caller), after_ms=after_ms)


def started(effects: list[Effect]) -> list[str]:
    return [effect.model for effect in effects if isinstance(effect, Start)]


def stopped(effects: list[Effect]) -> list[str]:
    return [effect.model for effect in effects if isinstance(effect, Stop)]


def granted(effects: list[Effect]) -> list[str]:
    return [effect.request for effect in effects if isinstance(effect, Grant)]


def refusals(effects: list[Effect]) -> list[str]:
    return [e.refusal.code.value for e in effects if isinstance(e, Refuse)]
