"""Making room: each demand that wants a replica has its turn, first in line first (8, 9, 10).

Think of a queue at a loading bay. Whoever is first gets the free bay, or has idle carts sent
away from the one that is cleared fastest; what was promised to one is not there for the next.
Who has waited too long puts up a barrier: the carts in one bay take nothing new, end what they
have, and leave together. A barrier that is not met within a minute opens for ten seconds, so
that a long job in one cart does not idle all the others, and closes again, each time for
twice as long; with that, work of any length is waited out in the end, and what is lost to
waiting is never more than a share of it.

Stopping each cart of a bay as soon as it is idle was refused: the last one may be busy for an
hour, and the others would stand empty for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rota.core import room, words
from rota.core.effects import RefusalCode
from rota.core.events import StopCause
from rota.core.eviction import Plan
from rota.core.orders import Orders
from rota.core.room import Outlook
from rota.core.state import BEHIND, Barrier, Demand, Failure, Promise, Rank, Replica, State
from rota.core.types import Phase, ReplicaId

COOLDOWN_MS_MIN = 5_000
COOLDOWN_MS_MAX = 300_000
"""The pause after a failure; it doubles with each one from the first bound to the second."""
BARRIER_MS = 60_000
"""How long a barrier stands at first; it doubles each time that it was not met."""
REOPENED_MS = 10_000
"""How long a barrier that was not met lets requests through."""


@dataclass(slots=True, eq=False)
class Clearing:
    """Decides for whom room is made, and at whose cost."""

    orders: Orders

    @property
    def _state(self) -> State:
        return self.orders.state

    def walk(self) -> None:
        """8, 9, 10: along the queue; then what is loaded for nobody."""
        if not self._state.ledger.totals:
            return
        queue = self._state.queue()
        preloads = self._state.to_preload() if self._state.preloads else ()
        outlook = Outlook(self._state) if queue or preloads else None
        for rank, demand in queue:
            assert outlook is not None
            while self._decide(demand, rank, outlook):
                pass
            promise = demand.promise
            if promise is not None:
                is_closed = self._is_closed(demand, promise)
                outlook.note(rank, demand, promise, is_closed=is_closed)
            waits = demand.replicas_needed() and not demand.is_cooling(self._state.now_ms)
            if waits and (promise is None or promise.is_barrier):
                outlook.is_someone_left = True
            self.orders.tell(demand, outlook)
        if outlook is not None and not outlook.is_someone_left:
            for demand in preloads:
                self._preload(demand, outlook)
        self._close({} if outlook is None else outlook.closing)

    def _preload(self, demand: Demand, outlook: Outlook) -> None:
        """8a, for nobody and after everyone: nobody waits for room, and nobody leaves."""
        placement = outlook.free_place(demand.model)
        if placement is not None:
            self.orders.start(demand, placement)

    def _decide(self, demand: Demand, rank: Rank, outlook: Outlook) -> bool:
        """One demand's turn. Returns whether it may have another."""
        state, model = self._state, demand.model
        if demand.replicas_wanted() == 0:
            return False
        placement = outlook.free_place(model)
        if placement is not None:  # 8a
            # A pinned or kept one narrows what others may hope for (10).
            self.orders.is_room_stale |= demand.is_pinned or model.scaling.is_always
            self.orders.start(demand, placement)
            return True
        is_needed = demand.replicas_needed() > 0
        if is_needed and not state.lost and not outlook.fits_somewhere(model):  # 3
            self._give_up_load(demand, RefusalCode.MODEL_FAILED)
            return False
        self._promise(demand, rank, outlook)
        if demand.promise is not None:
            self._pursue(demand, rank, outlook)
        elif not is_needed:
            self._look_again(demand)
        elif not state.lost and not outlook.could_come_free(model):  # 10
            self._give_up_load(demand, RefusalCode.NO_ROOM)
        return False  # 9

    def _look_again(self, demand: Demand) -> None:
        """One more takes none that was used lately: be woken when one no longer was."""
        later = [ms for ms in room.spared_until_ms(self._state) if ms > self._state.now_ms]
        if later:
            self.orders.wake_at(demand, min(later))

    # ── promises ─────────────────────────────────────────────────────────────────────────

    def _promise(self, demand: Demand, rank: Rank, outlook: Outlook) -> None:
        """8b, then 8c: whose going makes room.

        A promise is kept while it is good, but work is not waited for once idle ones will do.
        """
        state, kept = self._state, demand.promise
        if kept is not None and not room.still_stands(state, demand.model, kept, outlook.promised):
            kept = None
        if kept is None or kept.is_barrier:
            found = outlook.plan_at_once(demand, rank)
            is_past_patience = rank[0] != BEHIND and self._is_past_patience(demand)
            if found is not None and found.victims and demand.is_doubtful and not is_past_patience:
                kept = None
            elif found is not None:
                kept = self._promise_of(found, is_barrier=False)
            elif not is_past_patience or not state.rules.barriers:
                kept = None
            elif kept is None or self._is_to_be_chosen_anew(demand.barrier):
                found = outlook.plan_in_the_end(demand)
                kept = None if found is None else self._promise_of(found, is_barrier=True)
                demand.barrier.open_until_ms = 0
        if kept != demand.promise:
            demand.barrier.closed_ms = None
            demand.promise = kept

    def _promise_of(self, plan: Plan, *, is_barrier: bool) -> Promise:
        leaving = frozenset(plan.victims)
        leavers = sorted({self._state.replicas[victim].model.name for victim in plan.victims})
        quieting = frozenset(room.beside(self._state, plan.placement, leaving))
        return Promise(
            plan.placement, leaving, quieting, tuple(leavers), is_barrier, rule=plan.rule
        )

    def _is_past_patience(self, demand: Demand) -> bool:
        ends_ms = demand.patience_ends_ms()
        return ends_ms is not None and ends_ms <= self._state.now_ms

    def _pursue(self, demand: Demand, rank: Rank, outlook: Outlook) -> None:
        """Stop what must go, once all of it can."""
        promise, state = demand.promise, self._state
        assert promise is not None, demand.model.name
        known = (state.replicas.get(replica_id) for replica_id in sorted(promise.leaving))
        staying = [replica for replica in known if replica and not replica.is_leaving]
        able = [replica for replica in staying if room.may_go(state, replica, demand, rank)]
        if len(able) < len(staying) and state.rules.whole_sets:
            return
        if any(replica.phase is Phase.STARTING for replica in able):
            demand.promise = replace(promise, calls_off=True)
        for replica in able:
            # What it leaves over may do for one who came first and saw no way.
            self.orders.is_room_stale |= outlook.is_someone_left
            why = words.eviction_reason(state, demand, replica)
            self.orders.stop(replica, why, rival=demand.model.name)
        if promise.is_barrier and len(able) == len(staying) and not promise.quieting:
            # It is met: what is on its way out comes free without being waited for any more.
            assert demand.promise is not None, demand.model.name
            demand.promise = replace(demand.promise, is_barrier=False)
            demand.barrier.closed_ms = None

    # ── barriers ─────────────────────────────────────────────────────────────────────────

    def _is_closed(self, demand: Demand, promise: Promise) -> bool:
        """Whether those in the way take no later request; opens and closes it by the clock."""
        barrier, now_ms = demand.barrier, self._state.now_ms
        if not promise.is_barrier:
            return True
        if now_ms < barrier.open_until_ms:
            return False
        if barrier.closed_ms is None:
            if not self._may_close(promise):
                return False
            barrier.closed_ms = now_ms
            barrier.opens_ms = now_ms + BARRIER_MS * 2**barrier.unmet
        elif now_ms < barrier.opens_ms or not self._state.rules.reopening:
            return True
        else:
            barrier.unmet += 1
            barrier.closed_ms = None
            barrier.open_until_ms = now_ms + REOPENED_MS
        self.orders.touch(demand)  # to be woken for what comes next of it
        return barrier.closed_ms is not None

    def _is_to_be_chosen_anew(self, barrier: Barrier) -> bool:
        return 0 < barrier.open_until_ms <= self._state.now_ms

    def _may_close(self, promise: Promise) -> bool:
        """A barrier closes at once for all, and for none before each has come up, is owed to
        nobody and has had its residence."""
        return all(
            self._may_be_closed(replica)
            for replica_id in promise.closes
            if (replica := self._state.replicas.get(replica_id)) is not None
        )

    def _may_be_closed(self, replica: Replica) -> bool:
        if replica.phase is not Phase.READY:
            return replica.phase is not Phase.STARTING
        is_resident = self._state.now_ms < replica.resident_until_ms
        return not is_resident and not self._state.demand_of(replica).owes(replica)

    def _close(self, closing: Mapping[ReplicaId, Rank]) -> None:
        """8c: who makes way takes no later request; who need not any more is open again."""
        for replica_id in sorted(self._state.closed | closing.keys()):
            replica = self._state.replicas.get(replica_id)
            if replica is None:
                continue
            closed_for = closing.get(replica_id) if replica.phase is Phase.READY else None
            if closed_for == replica.closed_for:
                continue
            demand = self._state.demand_of(replica)
            is_news = replica.closed_for is None
            replica.closed_for = closed_for
            if closed_for is None:
                self._state.closed.discard(replica_id)
            else:
                self._state.closed.add(replica_id)
            if is_news and not demand.is_open:
                self.orders.turn_cold(demand)
            else:
                self.orders.review(demand)

    # ── no room ──────────────────────────────────────────────────────────────────────────

    def _give_up_load(self, demand: Demand, code: RefusalCode) -> None:
        """3, 10: no load can come of it. What is up serves on."""
        if code is RefusalCode.MODEL_FAILED:
            text = words.refusal(self._state, demand, code, "").message
            demand.failure = Failure(StopCause.REFUSED, text, is_permanent=True)
        self._pause_min(demand, code)
        if not demand.is_up:
            self.orders.give_up(demand, code)

    def _pause_min(self, demand: Demand, code: RefusalCode) -> None:
        """Look at a missing `min` that nothing can help again after a pause."""
        if demand.missing is None or demand.is_cooling(self._state.now_ms):
            return
        text = words.refusal(self._state, demand, code, "").message
        demand.failure = Failure(StopCause.REFUSED, text, is_permanent=True)
        demand.cooldown_until_ms = self._state.now_ms + COOLDOWN_MS_MAX
        demand.missing = (demand.cooldown_until_ms, demand.missing[1])
        self.orders.touch(demand)
