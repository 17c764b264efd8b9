"""Questions about room: where a model fits, now or after somebody leaves.

The scheduler asks, decides and orders; here is only what is so. Each question takes what was
`Promised` to the demands that come first: it is not there for others.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rota.core import worth
from rota.core.eviction import NOTHING, Candidate, Cost, Plan, least_cost, plan
from rota.core.ledger import DeviceKey, DeviceRoom
from rota.core.placement import could_ever_fit, place
from rota.core.state import BEHIND, Demand, Promise, Rank, Replica, State
from rota.core.types import Device, Eviction, Model, ModelName, NodeId, Phase, Placement, ReplicaId

PLANNED_MAX = 100
"""In a fleet of more replicas than this nobody is planned for only to be named."""
NAMED_MAX = 5
"""One more than a sentence names, so that it can say that there are others."""
Shape = tuple[int | None, int, frozenset[str] | None]
"""What matters of a model for where it fits: memory, devices, and which ones."""
Key = tuple[Shape, ModelName | None]


def shape(model: Model) -> Shape:
    return (model.memory_mib, model.device_count, model.devices)


@dataclass(slots=True)
class Promised:
    """What the demands that come first were promised.

    Args:
        claims: MiB, by device.
        models: who will stand on a node.
        leaving: who makes way for them.
    """

    claims: dict[DeviceKey, int] = field(default_factory=dict)
    models: dict[NodeId, set[ModelName]] = field(default_factory=dict)
    leaving: set[ReplicaId] = field(default_factory=set)

    def add(self, model: ModelName, promise: Promise) -> None:
        placement = promise.placement
        for device, mib in placement.shares():
            key = (placement.node, device)
            self.claims[key] = self.claims.get(key, 0) + mib
        if placement.devices:
            self.models.setdefault(placement.node, set()).add(model)
        self.leaving |= promise.leaving


UNPROMISED = Promised()
"""Where what is promised does not matter; nothing is added to it."""


@dataclass(slots=True)
class Outlook:
    """What one walk along the queue has seen so far.

    Along a walk memory only becomes scarcer and fewer may leave, so what did not fit for one
    model does not fit for a later one of its shape: fifty that wait cost little more than one.
    A start of a model that is kept narrows even what may come free some day; whoever orders it
    has the queue walked again.

    Args:
        promised: what the demands before were promised.
        closing: those who take no later request, and for whom.
        full: the shapes for which there is no free place.
        hopeless: the shapes for which no idle ones make room, with whether holds counted.
        endless: the shapes for which nothing will make room, as promises stand.
        fitting: whether a shape fits an empty node.
        coming: whether room for a shape may come free some day.
        named: who is in the way of which shape.
        is_someone_left: whether a demand had its turn and still waits for work to end.
    """

    state: State
    promised: Promised = field(default_factory=Promised)
    closing: dict[ReplicaId, Rank] = field(default_factory=dict)
    full: set[Key] = field(default_factory=set)
    hopeless: set[tuple[Key, bool]] = field(default_factory=set)
    endless: set[Key] = field(default_factory=set)
    fitting: dict[Shape, bool] = field(default_factory=dict)
    coming: dict[Key, bool] = field(default_factory=dict)
    named: dict[Key, list[Replica]] = field(default_factory=dict)
    is_someone_left: bool = False
    unquiet: frozenset[DeviceKey] = field(init=False)
    loose: Sequence[Replica] = field(init=False)
    is_any_abandoned: bool = field(init=False)

    def __post_init__(self) -> None:
        self.unquiet = unquiet(self.state)
        self.loose = above_min(self.state, list(self.state.loose.values()))
        self.is_any_abandoned = any(
            replica.phase is Phase.STARTING and self.state.demand_of(replica).is_loaded_for_nobody
            for replica in self.loose
        )

    def free_place(self, model: Model) -> Placement | None:
        """Where it fits in memory that is free and promised to nobody before it."""
        key = self._key(model)
        if key in self.full:
            return None
        found = free_place(self.state, model, self.promised, self.unquiet)
        if found is None:
            self.full.add(key)
        return found

    def fits_somewhere(self, model: Model) -> bool:
        """Whether some node could hold it if it were empty."""
        if shape(model) not in self.fitting:
            self.fitting[shape(model)] = fits_somewhere(self.state, model)
        return self.fitting[shape(model)]

    def could_come_free(self, model: Model) -> bool:
        """Whether it would fit if everyone left who ever may."""
        key = self._key(model)
        if key not in self.coming:
            self.coming[key] = could_come_free(self.state, model)
        return self.coming[key]

    def plan_at_once(self, demand: Demand, rank: Rank) -> Plan | None:
        """The cheapest set of those who may leave this instant."""
        honours = honours_holds(self.state, demand)
        key = (self._key(demand.model), honours)
        if key in self.hopeless:
            return None
        able = [
            replica
            for replica in self.loose
            if replica.id not in self.promised.leaving and may_go(self.state, replica, demand, rank)
        ]
        found = best_plan(self.state, demand.model, self.promised, able, self.unquiet)
        if found is None and not self.is_any_abandoned:  # they may go for some and not for others
            self.hopeless.add(key)
        return found

    def plan_in_the_end(self, demand: Demand) -> Plan | None:
        """The cheapest set of those who will or may leave some day."""
        key = self._key(demand.model)
        if key in self.endless:
            return None
        others = [r for r in goers(self.state) if r.id not in self.promised.leaving]
        found = best_plan(self.state, demand.model, self.promised, others)
        if found is None:
            self.endless.add(key)
        return found

    def in_the_way(self, state: State, model: Model) -> list[Replica]:
        """See the function of this name."""
        key = self._key(model)
        if key not in self.named:
            self.named[key] = in_the_way(state, model)
        return self.named[key]

    def note(self, rank: Rank, demand: Demand, promise: Promise, *, is_closed: bool) -> None:
        """Take a promise in: what comes later on the walk sees it."""
        self.promised.add(demand.model.name, promise)
        if is_closed:
            for replica_id in promise.closes:
                if not is_owed(self.state, replica_id):  # it stands for its callers first
                    self.closing.setdefault(replica_id, rank)

    def _key(self, model: Model) -> Key:
        """What is the same for one model as for another, as far as room goes: where rules say
        which may stand together, none is like another."""
        return (shape(model), None if self.state.coexistence.is_free else model.name)


def in_the_way(state: State, model: Model) -> list[Replica]:
    """Whose end is waited for: of a fleet that is not large those who would be made to leave if
    they could; of a large one, some of all who hold memory."""
    if len(state.replicas) <= PLANNED_MAX:
        found = best_plan(state, model, UNPROMISED, goers(state))
        victims = () if found is None else found.victims
        return [state.replicas[victim] for victim in victims]
    placed = (replica for replica in state.replicas.values() if replica.placement.devices)
    return list(islice(placed, NAMED_MAX))


def is_owed(state: State, replica_id: ReplicaId) -> bool:
    """Whether a replica stands for callers who were told to come back."""
    replica = state.replicas.get(replica_id)
    return replica is not None and state.demand_of(replica).owes(replica)


def unquiet(state: State) -> frozenset[DeviceKey]:
    """The devices on which nothing may be started: a replica that bears nothing beside it is at
    work there."""
    return frozenset(
        (replica.placement.node, device)
        for replica in state.exclusive.values()
        if replica.is_busy
        for device in replica.placement.devices
    )


def beside(state: State, placement: Placement, leaving: Container[ReplicaId]) -> list[ReplicaId]:
    """Those that must fall quiet before something is started there, and stay."""
    return [
        replica.id
        for replica in state.exclusive.values()
        if replica.id not in leaving
        and not replica.is_leaving
        and replica.placement.node == placement.node
        and not set(placement.devices).isdisjoint(replica.placement.devices)
    ]


def free_place(
    state: State, model: Model, promised: Promised, unquiet: Container[DeviceKey] = frozenset()
) -> Placement | None:
    """Where it fits in memory that is free and promised to nobody before it, beside models that
    it may stand with."""
    for node in state.ledger.totals:
        if model.is_external:
            return Placement(node, (), ())
        if _is_full(state, model, node) or not may_stand(state, model, node, promised):
            continue
        placement = place(model, node, _rooms(state, node, promised, unquiet))
        if placement is not None:
            return placement
    return None


def fits_somewhere(state: State, model: Model) -> bool:
    """Whether some node could hold it if it were empty."""
    return any(
        could_ever_fit(model, [Device(device, total) for device, total in devices.items()])
        for devices in state.ledger.totals.values()
    )


def best_plan(
    state: State,
    model: Model,
    promised: Promised,
    victims: Iterable[Replica],
    unquiet: Container[DeviceKey] = frozenset(),
) -> Plan | None:
    """The cheapest plan over all nodes that needs no others than these to leave: where the
    matrix states what an eviction costs, by that, then by who leaves.

    Nodes are planned in the order of the least that a plan there can cost, until no other can be
    cheaper: where all are idle, a fleet costs hardly more than one node.
    """
    coexistence = state.coexistence
    by_node: dict[NodeId, list[Candidate]] = {node: [] for node in state.ledger.totals}
    for replica in victims:
        if not replica.is_leaving and coexistence.may_displace(model.name, replica.model.name):
            by_node[replica.placement.node].append(_candidate(state, replica))
    if not coexistence.is_free and not model.is_external:
        return _best_by_rule(state, model, promised, by_node, unquiet)
    floors = sorted(
        (least_cost(candidates) if _is_full(state, model, node) else NOTHING, index, node)
        for index, (node, candidates) in enumerate(by_node.items())
        if candidates or not _is_full(state, model, node)
    )
    best: tuple[Cost, int, Plan] | None = None
    for floor, index, node in floors:
        if best is not None and best[:2] < (floor, index):
            break
        found = plan(model, node, _rooms(state, node, promised, unquiet), by_node[node])
        if found is not None and (best is None or (found.cost, index) < best[:2]):
            best = (found.cost, index, found)
    return None if best is None else best[2]


def _best_by_rule(
    state: State,
    model: Model,
    promised: Promised,
    by_node: Mapping[NodeId, Sequence[Candidate]],
    unquiet: Container[DeviceKey],
) -> Plan | None:
    """The same where rules say which models may stand together: those that may not be beside it
    leave first, and then who holds memory that it needs."""
    best: tuple[tuple[int, Cost, int], Plan] | None = None
    for index, (node, candidates) in enumerate(by_node.items()):
        if not _bears(state, model, node, promised):
            continue
        rooms = _rooms(state, node, promised, unquiet)
        there = _present(state, node)
        for option in state.coexistence.options(model.name, frozenset(there)):
            if not option.leaving.isdisjoint(promised.models.get(node, ())):
                continue
            going = [r for name in option.leaving for r in there[name] if not r.is_leaving]
            must = {r.id for r in going if r.id not in promised.leaving}
            forced = [candidate for candidate in candidates if candidate.replica in must]
            if len(forced) < len(must):  # one of them may not leave
                continue
            found = plan(model, node, rooms, candidates, forced)
            if found is None:
                continue
            cost = (option.cost, found.cost, index)
            if best is None or cost < best[0]:
                best = (cost, replace(found, rule=option if option.leaving else None))
    return None if best is None else best[1]


def _present(state: State, node: NodeId) -> dict[ModelName, list[Replica]]:
    """Who is on a node, in whatever phase: one that is ending is there until it has ended."""
    found: dict[ModelName, list[Replica]] = {}
    for replica in state.replicas.values():
        if replica.placement.node == node and replica.placement.devices:
            found.setdefault(replica.model.name, []).append(replica)
    return found


def _bears(state: State, model: Model, node: NodeId, promised: Promised) -> bool:
    """Whether those to whom a place there is promised may stand beside it, whichever comes first:
    else it would have to leave again at once, or they would."""
    rules, target = state.coexistence, model.name
    others = promised.models.get(node, set()) - {target}
    return all(
        any(not option.leaving for option in rules.options(other, frozenset({target})))
        and any(not option.leaving for option in rules.options(target, frozenset({other})))
        for other in others
    )


def may_stand(
    state: State,
    model: Model,
    node: NodeId,
    promised: Promised,
    leaving: Container[ReplicaId] | None = None,
) -> bool:
    """Whether the rules let a model stand on a node.

    Args:
        leaving: who will be gone by then, beside those that are ending; None = as of now.
    """
    rules = state.coexistence
    if rules.is_free or model.is_external:
        return True
    staying = {
        name
        for name, replicas in _present(state, node).items()
        if leaving is None or any(not r.is_leaving and r.id not in leaving for r in replicas)
    }
    staying |= promised.models.get(node, set())
    options = rules.options(model.name, frozenset(staying - {model.name}))
    is_free = any(not option.leaving for option in options)
    return is_free and _bears(state, model, node, promised)


def still_stands(state: State, model: Model, promise: Promise, promised: Promised) -> bool:
    """Whether a promise will be good once all that leaves has left, and all of it may leave."""
    node = promise.placement.node
    if node not in state.ledger.totals:
        return False
    if not may_stand(state, model, node, promised, promise.leaving | promised.leaving):
        return False
    rooms = state.ledger.rooms(node, promised.claims)
    have = {room.id: room.free + room.coming for room in rooms}
    counted_on: dict[ModelName, int] = {}
    for replica_id in promise.leaving - state.ledger.leaving:
        replica = state.replicas.get(replica_id)
        if replica is not None:
            name = replica.model.name
            counted_on[name] = counted_on.get(name, 0) + replica.is_live
            for device, mib in replica.placement.shares():
                have[device] += mib
    if any(count > _spare(state.demands[name]) for name, count in counted_on.items()):
        return False
    return all(have[device] >= mib for device, mib in promise.placement.shares())


def could_come_free(state: State, model: Model) -> bool:
    """Whether it would fit if everyone left who ever may: only what is pinned, or kept by `min`,
    stays."""
    if not state.keeping and state.coexistence.is_free:
        return fits_somewhere(state, model)
    return best_plan(state, model, UNPROMISED, goers(state)) is not None


def honours_holds(state: State, demand: Demand) -> bool:
    """Whether this demand still waits for the holds of others."""
    until_ms = demand.honours_holds_until_ms()
    return until_ms is not None and state.now_ms < until_ms


def may_go(state: State, replica: Replica, rival: Demand, rank: Rank) -> bool:
    """Whether it may leave at once for a rival of this rank: idle, owed to nobody, not held
    against this rival, and not wanted by callers who come first, for whom it would only have
    to be loaded again; or loading for nobody, or for those whom others serve. Who has a replica
    and wants one more takes none that was used in the time that it takes to load it again."""
    demand, is_for_more = state.demand_of(replica), rank[0] == BEHIND
    if replica.phase is Phase.STARTING:
        is_free = demand.is_loaded_for_nobody and not is_for_more
        return is_free and may_be_called_off(state, replica, rival)
    if not replica.is_idle or demand.owes(replica):
        return False
    is_held = demand.held_until_ms > state.now_ms
    if is_for_more:  # never at the cost of another model's work
        reload_ms = worth.reload_ms(demand.load_ms)
        if is_held or demand is rival or state.now_ms - replica.last_use_ms < reload_ms:
            return False
    if is_held and (state.now_ms < replica.resident_until_ms or honours_holds(state, rival)):
        return False
    own_rank = state.rank(demand)
    return own_rank is None or rank < own_rank


def spared_until_ms(state: State) -> list[int]:
    """When each that is idle has been so for as long as it takes to load it again."""
    return [
        replica.last_use_ms + worth.reload_ms(state.demand_of(replica).load_ms)
        for replica in state.loose.values()
        if replica.phase is Phase.READY
    ]


def may_be_called_off(state: State, replica: Replica, rival: Demand) -> bool:
    """Whether a load that nobody waits for may end for a rival's: not if another load was called
    off for it already, nor if it is nearer its end than the rival's own load would be. One that
    takes more than twice its time is near nothing."""
    if replica.has_displaced_load and state.rules.called_off_once:
        return False
    load_ms = state.demand_of(replica).load_ms
    if load_ms is None or rival.load_ms is None or overdue_ms(state, replica) <= state.now_ms:
        return True
    return replica.phase_since_ms + load_ms - state.now_ms >= rival.load_ms


def overdue_ms(state: State, replica: Replica) -> int:
    """When a load has taken twice the time that is known of it."""
    return replica.phase_since_ms + 2 * (state.demand_of(replica).load_ms or 0)


def goers(state: State) -> list[Replica]:
    """Everyone who will or may leave some day, whatever keeps it now."""
    replicas = state.replicas.values()
    live = [r for r in replicas if r.is_live and r.placement.devices]
    return above_min(state, live) + [r for r in replicas if r.phase is Phase.DRAINING]


def above_min(state: State, replicas: Sequence[Replica]) -> list[Replica]:
    """Those of these live ones that may leave some day: none that is pinned, and of each model
    with a `min` no more than it has above that, those first that are easiest to lose."""
    found: list[Replica] = []
    kept: dict[ModelName, list[Replica]] = {}
    for replica in replicas:
        demand = state.demand_of(replica)
        if demand.model.name not in state.keeping:
            found.append(replica)
        elif not demand.is_pinned:
            kept.setdefault(replica.model.name, []).append(replica)
    for name, group in kept.items():
        # One that loads stands for none that serves, should it fail.
        loading = [replica for replica in group if replica.phase is Phase.STARTING]
        ready = [replica for replica in group if replica.phase is not Phase.STARTING]
        ready.sort(key=lambda replica: (not replica.is_idle, replica.last_use_ms))
        demand = state.demands[name]
        serving = sum(1 for _ in demand.ready())
        spare = max(0, _spare(demand) - (sum(1 for _ in demand.live()) - serving))
        found += (loading + ready[:spare])[: _spare(demand)]
    return found


def holders(state: State, demand: Demand) -> list[str]:
    """The models that keep memory from this demand whatever happens."""
    name, rules = demand.model.name, state.coexistence
    others = [other for other in state.demands.values() if other is not demand and other.replicas]
    return sorted(
        other.model.name
        for other in others
        if other.model.name in state.keeping or not rules.may_displace(name, other.model.name)
    )


def _spare(demand: Demand) -> int:
    """How many of its live replicas may leave."""
    if demand.is_pinned:
        return 0
    floor = 0 if demand.is_held_down else demand.model.scaling.min
    return max(0, sum(1 for _ in demand.live()) - floor)


def _is_full(state: State, model: Model, node: NodeId) -> bool:
    """Whether no device there can hold it unless somebody leaves: said of most nodes, at once."""
    return state.ledger.roomiest_mib(node) < (model.memory_mib or 0)


def _rooms(
    state: State, node: NodeId, promised: Promised, unquiet: Container[DeviceKey]
) -> list[DeviceRoom]:
    rooms = state.ledger.rooms(node, promised.claims)
    return [room for room in rooms if (node, room.id) not in unquiet] if unquiet else rooms


def _candidate(state: State, replica: Replica) -> Candidate:
    """As the planner sees it; one that has yet to serve is as good as used this instant."""
    placement, demand = replica.placement, state.demand_of(replica)
    has_yet_to_serve = replica.phase is Phase.STARTING or demand.owes(replica)
    is_busy = has_yet_to_serve or not replica.is_idle
    return Candidate(
        replica=replica.id,
        holds_mib=dict(placement.shares()),
        last_use_ms=state.now_ms if has_yet_to_serve else replica.last_use_ms,
        is_busy=is_busy,
        loss_ms=0.0 if is_busy else _loss_ms(state, demand, replica),
    )


def _loss_ms(state: State, demand: Demand, replica: Replica) -> float:
    """What the absence of a replica is expected to cost; that of one beside others is the first
    to be borne."""
    if state.eviction is Eviction.LRU or next(demand.live()) is not replica:
        return 0.0
    return worth.loss_ms(demand.history, demand.load_ms, state.now_ms)
