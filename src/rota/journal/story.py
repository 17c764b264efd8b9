"""One request's story in sentences: what it waited for, who left for it, what that cost.

Read from recorded steps alone, so it can be told of a running rota and of a file alike. What
the sentences rest on is in the effects; a log of its own for each request was refused, since
nearly nobody ever asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, assert_never

from rota.core.describe import describe
from rota.core.effects import (
    Effect,
    Grant,
    Leased,
    LeaseEnded,
    Loaded,
    Refuse,
    Start,
    Stop,
    Tell,
)
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LoadAsked,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
)
from rota.core.types import ModelName, ReplicaId, RequestId
from rota.journal.recorder import Step

Arrival = RequestArrived | LoadAsked | LeaseAsked

STORIES_MAX = 10
"""Told of one id: some clients give every request the same one."""


class Stage(Enum):
    """How far a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence, and when it came true, in seconds from the request's arrival (before: < 0)."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known of one request.

    Args:
        arrived_ms: on the clock of the steps.
    """

    request: RequestId
    model: ModelName
    arrived_ms: int
    stage: Stage
    lines: tuple[Line, ...]

    def as_plain(self) -> dict[str, object]:
        """As JSON can say it."""
        return {
            "request": self.request,
            "model": self.model,
            "state": self.stage.value,
            "lines": [{"at_s": line.at_s, "text": line.text} for line in self.lines],
        }


def stories(steps: Iterable[Step], wanted: str) -> list[Story]:
    """The stories of the requests of that id, ours or the client's own; of many, the latest."""
    steps = tuple(steps)
    found = [
        (number, step.event)
        for number, step in enumerate(steps)
        if isinstance(step.event, Arrival) and _is_called(step.event.request, wanted)
    ]
    return [_Teller(arrival).tell(steps, number) for number, arrival in found[-STORIES_MAX:]]


def _is_called(request: RequestId, wanted: str) -> bool:
    """A request is known by our id, or as `theirs~ours` (see `gateway.proxy`) by any part."""
    return f"~{wanted}~" in f"~{request}~"


class _Moment(NamedTuple):
    at_ms: int
    text: str


@dataclass(slots=True)
class _Eviction:
    """A replica that leaves for the model of the story."""

    model: ModelName
    asked_ms: int
    again: ReplicaId | None = None  # who was started for its model afterwards
    again_ms: int = 0


@dataclass(slots=True)
class _Teller:
    """Walks over the steps once, and keeps what belongs to one request's story."""

    arrival: Arrival
    has_arrived: bool = False
    stage: Stage = Stage.WAITING
    granted_ms: int = 0
    replica: ReplicaId = ""
    waits_for: str = ""
    moments: list[_Moment] = field(default_factory=list)
    loads: dict[ReplicaId, int] = field(default_factory=dict)  # of its model, since when
    evictions: dict[ReplicaId, _Eviction] = field(default_factory=dict)

    def tell(self, steps: tuple[Step, ...], arrived: int) -> Story:
        for step in steps[:arrived]:
            self._before(step)
        arrived_ms = steps[arrived].now_ms
        self.has_arrived = True
        self._say(arrived_ms, _say_arrival(self.arrival))
        said = len(self.moments)
        self._during(steps[arrived])
        is_news = len(self.moments) > said
        if not is_news and self.waits_for:  # told to those before it, and still so
            self._say(arrived_ms, f"joined those who wait: {self.waits_for}")
        for step in steps[arrived + 1 :]:
            if self.stage is not Stage.OVER:
                self._during(step)
            self._count_cost(step)
        lines = [Line((at_ms - arrived_ms) / 1_000, text) for at_ms, text in self.moments]
        request, model = self.arrival.request, self.arrival.model
        return Story(request, model, arrived_ms, self.stage, tuple(lines))

    # ── what had been done for its model before it came ──────────────────────────────────

    def _before(self, step: Step) -> None:
        """Keep what leads to a load that it will join; forget it when that load has ended."""
        event = step.event
        if isinstance(event, ReplicaReady | ReplicaStopped) and event.replica in self.loads:
            self.moments.clear()
            self.loads.clear()
            self.evictions.clear()
        self._note_making_room(step)

    # ── while it waits and runs ──────────────────────────────────────────────────────────

    def _during(self, step: Step) -> None:
        self._hear(step.event, step.now_ms)
        if step.raised and getattr(step.event, "request", None) == self.arrival.request:
            self._say(step.now_ms, f"the scheduler broke on it: {step.raised}")
            self.stage = Stage.OVER
        if self.stage is Stage.WAITING:
            self._note_making_room(step)
        for effect in step.effects:
            self._be_answered(effect, step.now_ms)

    def _hear(self, event: Event, now_ms: int) -> None:
        request = self.arrival.request
        match event:
            case GrantEnded() if event.request == request and self.stage is Stage.RUNNING:
                took = _seconds(now_ms - self.granted_ms)
                goes_on = f" and goes on as {event.lease.lease}" if event.lease is not None else ""
                outcome = event.outcome.value
                self._end(now_ms, f"ended {outcome}, {took} after it was granted{goes_on}")
            case RequestCancelled() if event.request == request:
                self._end(now_ms, "its client left")
            case ReplicaReady() if event.replica in self.loads:
                took = _seconds(now_ms - self.loads.pop(event.replica))
                self._say(now_ms, f"{event.replica} was ready; the load took {took}")
            case ReplicaStopped() if event.replica in self.loads:
                del self.loads[event.replica]
                self._say(now_ms, describe(event))
            case ReplicaStopped() if event.replica == self.replica:
                self._end(now_ms, f"was cut off: {describe(event)}")
            case _:
                pass

    def _be_answered(self, effect: Effect, now_ms: int) -> None:
        request = self.arrival.request
        match effect:
            case Grant() if effect.request == request:
                self.stage, self.granted_ms = Stage.RUNNING, now_ms
                self.replica = effect.replica
                why = f"; {effect.why}" if effect.why else ""
                waited = _seconds(effect.waited_ms)
                self._say(now_ms, f"was granted a slot of {effect.replica} after {waited}{why}")
            case Leased() if effect.lease == request:
                self.stage, self.granted_ms = Stage.RUNNING, now_ms
                self.replica = effect.replica
                waited = _seconds(effect.waited_ms)
                self._say(now_ms, f"was given its lease of {effect.replica} after {waited}")
            case LeaseEnded() if effect.lease == request:
                took = _seconds(now_ms - self.granted_ms)
                self._end(now_ms, f"its lease was over after {took}: {effect.why}")
            case Loaded() if effect.request == request:
                self._end(now_ms, f"was told that {effect.replica} is ready")
            case Refuse() if effect.request == request:
                again_ms = effect.refusal.retry_after_ms
                again = "" if again_ms is None else f", to come back in {again_ms // 1_000} s"
                code = effect.refusal.code.value
                self._end(now_ms, f"was refused, {code}{again}: {effect.refusal.message}")
            case _:
                pass

    # ── who leaves for it, and what is loaded ────────────────────────────────────────────

    def _note_making_room(self, step: Step) -> None:
        event, model = step.event, self.arrival.model
        if isinstance(event, ReplicaStopped) and event.replica in self.evictions:
            eviction = self.evictions[event.replica]
            took = _seconds(step.now_ms - eviction.asked_ms)
            text = f"{event.replica} of {eviction.model} was gone, {took} after it was told to stop"
            self._say(step.now_ms, text)
        for effect in step.effects:
            match effect:
                case Tell() if effect.model == model:
                    eta = effect.eta_ms
                    to_go = "" if eta is None else f", about {_seconds(eta)} to go"
                    self.waits_for = effect.text
                    if self.has_arrived:
                        self._say(step.now_ms, f"waits: {effect.text}{to_go}")
                case Stop() if effect.rival == model:
                    self.evictions[effect.replica] = _Eviction(effect.model, step.now_ms)
                    text = f"{effect.replica} of {effect.model} was told to stop: {effect.why}"
                    self._say(step.now_ms, text)
                case Start() if effect.model == model:
                    self.loads[effect.replica] = step.now_ms
                    where = " + ".join(effect.placement.devices) or effect.placement.node
                    text = f"{effect.replica} of {model} was started on {where}: {effect.why}"
                    self._say(step.now_ms, text)
                case _:
                    pass

    def _count_cost(self, step: Step) -> None:
        """Those who left for it and were wanted again had to be loaded anew."""
        for replica, eviction in self.evictions.items():
            if eviction.again is None:
                for effect in step.effects:
                    if isinstance(effect, Start) and effect.model == eviction.model:
                        eviction.again, eviction.again_ms = effect.replica, step.now_ms
                        later = _seconds(step.now_ms - eviction.asked_ms)
                        text = f"cost: {eviction.model} was loaded anew {later} after {replica}"
                        self._say(step.now_ms, f"{text} was told to stop")
            elif step.event == ReplicaReady(eviction.again):
                took = _seconds(step.now_ms - eviction.again_ms)
                self._say(step.now_ms, f"cost: that load of {eviction.model} took {took}")

    def _say(self, now_ms: int, text: str) -> None:
        self.moments.append(_Moment(now_ms, text))

    def _end(self, now_ms: int, text: str) -> None:
        self.stage = Stage.OVER
        self._say(now_ms, text)


def _say_arrival(arrival: Arrival) -> str:
    match arrival:
        case LoadAsked():
            return f"a load of {arrival.model} was asked for by hand"
        case LeaseAsked():
            what = arrival.replica or arrival.model
            ttl = _seconds(arrival.ttl_ms)
            return f"a lease of {what} for {ttl} was asked for, from {arrival.caller}"
        case RequestArrived():
            return f"asked for {arrival.model}, from {arrival.caller}"
        case _:
            assert_never(arrival)


def _seconds(ms: int) -> str:
    return f"{ms / 1_000:.3f} s"
