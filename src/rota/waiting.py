"""Who waits: at which place, for what, since when, and how long still.

Read from the scheduler's state when asked; nothing is kept for it. Callers who were told to
come back are listed too: their place in line is kept, and it is why a model loads for which
nobody seems to wait.
"""

from __future__ import annotations

from bisect import bisect_left

from rota.core.state import Demand, Entry, Presence, Rank, State
from rota.core.words import eta_ms, reason

Row = dict[str, object]


def waiting(state: State) -> list[Row]:
    """A row per caller not yet served, first in line first, as plain values for JSON."""
    ranked: list[tuple[Rank, Row]] = []
    for demand in state.demands.values():
        if demand.waiting or demand.told:
            about = _about(state, demand)
            ranks = sorted(state.entry_rank(demand, entry) for entry in demand.waiting)
            for entry in (*demand.waiting, *demand.told):
                rank = state.entry_rank(demand, entry)
                ahead = bisect_left(ranks, rank)
                row = _row(entry, state.now_ms) | {"ahead": ahead} | about
                ranked.append((rank, row | _awaited(demand, entry, rank)))
    ranked.sort(key=lambda pair: pair[0])
    return [row for _, row in ranked]


def _about(state: State, demand: Demand) -> Row:
    """What all who wait for one model wait for."""
    tell = reason(state, demand)
    return {
        "model": demand.model.name,
        "position": state.position(demand.model.name),
        "for": tell.kind.value,
        "reason": tell.text,
        "eta_s": _seconds(eta_ms(state, demand)),
    }


def _awaited(demand: Demand, entry: Entry, rank: Rank) -> Row:
    """Of an absent caller whom the model would serve at once: that nothing but it is missing."""
    is_free = any(replica.has_slot and replica.takes(rank) for replica in demand.replicas.values())
    if entry.presence is Presence.WAITING or not is_free:
        return {}
    kept = " and kept for it" if entry.owed_by else ""
    return {"for": "return", "reason": f"{demand.model.name} is ready{kept}", "eta_s": None}


def _row(entry: Entry, now_ms: int) -> Row:
    is_here = entry.presence is Presence.WAITING
    return {
        "request": entry.request,
        "caller": entry.caller,
        "wants": entry.kind.value,
        "priority": entry.priority,
        "waited_s": _seconds(now_ms - entry.since_ms),
        "is_here": is_here,
        "back_in_s": None if is_here else _seconds(entry.back_ms - now_ms),
    }


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000
