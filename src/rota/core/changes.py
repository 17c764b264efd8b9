"""The catalog changes while it is served: nothing that runs or waits is lost for it.

Think of a new timetable: trains under way arrive, who queues keeps the place, and what is no
longer on it takes nobody in any more and goes when it is empty. What a model may do counts
from now on; what a replica was started with (its slots, its memory) stays as it is until it
ends, since the process is what it is.

Ending what has changed and starting it anew was refused: a corrected typo in one entry would
cut every stream and cost every load (cases C1, W23).
"""

from __future__ import annotations

from dataclasses import replace

from rota.core.effects import RefusalCode
from rota.core.events import ModelsChanged
from rota.core.orders import Orders
from rota.core.room import shape
from rota.core.state import Demand
from rota.core.types import Model, ModelName, Phase, Preload, Scaling

_OFF = Scaling(min=0, max=0, idle_timeout_ms=0)


def new_demand(model: Model) -> Demand:
    """A model that nobody has asked for yet."""
    return Demand(model=model, load_ms=model.load_ms, is_pinned=model.is_pinned)


def unknown_model(name: ModelName) -> Model:
    """What stands for a model that a node runs and no file has any more: it only ends."""
    return Model(name=name, scaling=_OFF, memory_mib=None)


def change_models(orders: Orders, event: ModelsChanged) -> None:
    """Let another catalog count from now on."""
    state = orders.state
    if state.coexistence != event.coexistence:
        state.coexistence = event.coexistence
        for demand in state.demands.values():
            orders.drop_promise(demand)
    if event.eviction is not None:
        state.eviction = event.eviction
    before, coming = state.demands, {model.name: model for model in event.models}
    state.demands = {name: before.get(name) or new_demand(model) for name, model in coming.items()}
    state.demands |= {name: demand for name, demand in before.items() if name not in coming}
    for name, demand in before.items():
        if name in coming:
            _keep(orders, demand, coming[name], is_relaunched=name in event.relaunched)
        else:  # until the last of it has ended
            _remove(orders, demand)
    for demand in state.demands.values():
        state.note_kept(demand)
        orders.note_missing(demand)
        retire(orders, demand)
        orders.review(demand)
    orders.is_room_stale = True


def forget_removed(orders: Orders) -> None:
    """Let go of models that are no longer in the file, once nothing runs of them."""
    state = orders.state
    for name in [n for n, d in state.demands.items() if d.is_removed and not d.replicas]:
        del state.demands[name]
        state.wanting.pop(name, None)


def _keep(orders: Orders, demand: Demand, model: Model, *, is_relaunched: bool) -> None:
    """What is known of a model stays known; a pin by hand stays as it was set."""
    known, demand.model = demand.model, model
    if demand.is_pinned == known.is_pinned:
        demand.is_pinned = model.is_pinned
    if demand.load_ms is None:
        demand.load_ms = model.load_ms
    if model.scaling.is_always or model.preload is Preload.ALWAYS:
        demand.is_held_down = False
    demand.is_removed = False
    if shape(known) != shape(model):
        orders.drop_promise(demand)
    if is_relaunched or shape(known) != shape(model):  # what went wrong may be mended
        demand.failures, demand.failure = 0, None
        demand.cooldown_until_ms = orders.state.now_ms
    if model.scaling.is_off:
        orders.give_up(demand, RefusalCode.MODEL_OFF)


def _remove(orders: Orders, demand: Demand) -> None:
    orders.give_up(demand, RefusalCode.MODEL_NOT_FOUND)
    demand.model = replace(demand.model, scaling=_OFF, is_pinned=False)
    demand.is_removed, demand.is_pinned = True, False


def retire(orders: Orders, demand: Demand) -> None:
    """Of replicas that are more than there may be: those first that still load, then the idle,
    the latest before the oldest. Those at work take nothing new and leave after it."""
    live = list(demand.live())
    excess = len(live) - demand.model.scaling.max
    if excess <= 0:
        return
    why = "it is no longer in the file" if demand.is_removed else "there are more than there may be"
    live.reverse()
    live.sort(key=lambda replica: (replica.phase is not Phase.STARTING, not replica.is_idle))
    for replica in live[:excess]:
        orders.let_end(replica, why)
