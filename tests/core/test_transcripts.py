"""Stories of the scheduler, told command by command: what it is told, and what it orders.

Each file in transcripts/ is played and compared with what it says; `--rewrite` writes it anew.

A file is blocks: commands, `----`, what comes of them (with the time in seconds), an empty
line. Lines that begin with `#` are for the reader. Commands:

    model NAME [memory=8|whole] [devices=1] [min=0] [max=1] [idle=600] [slots=1] [queue=1000]
          [wait=45] [patience=300] [hold=0] [hold_finished=0] [load=S] [priority=0]
          [pinned] [exclusive] [rejects] [more=5] [preload=never]
                             memory in MiB, times in seconds
    group NAME MEMBERS [together] [guest] [persistent]   (members by comma; it swaps, and is
                             exclusive, unless it says `together` and `guest`)
    set NAME EXPRESSION      (of the matrix)             cost MODEL NUMBER
    other                    (models, groups and sets from here on are another catalog …)
    change                   (… which counts from now on)
    join DEVICE=MIB …        join-node NODE DEVICE=MIB … [REPLICA=MODEL:DEVICE:MIB …]
    lose-node NODE           ask ID MODEL CALLER[/MARK] [WAIT] [hold=S] [patience=S] [priority=N]
    leave ID                 end ID [OUTCOME]            call ID        (it ends in a tool call)
    job ID LEASE SECONDS     (it ends, and goes on as a lease)
    lease ID MODEL CALLER SECONDS [load] [on=REPLICA]    renew ID SECONDS     release ID
    ready REPLICA            gone REPLICA [CAUSE …]      lost REPLICA SAYING  (hopeless)
    silent REPLICA           pin MODEL                   unpin MODEL
    load ID MODEL            unload MODEL SECONDS        shutdown SECONDS
    wait SECONDS             (time passes; rota wakes when it asked to)
    agent MODEL CALLER EVERY N    (N rounds: it asks, and half the time later its answer calls
                             a tool; what is granted to it is not told)
    state                    (models in a word each, replicas, what waits, what is owed)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.core.coexistence import FREE, Coexistence, Group, Groups, Matrix
from rota.core.describe import describe, model_state
from rota.core.events import (
    Event,
    GrantEnded,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    LoadAsked,
    ModelsChanged,
    NodeJoined,
    NodeLost,
    Outcome,
    PinAsked,
    ReplicaReady,
    ReplicaSilent,
    ReplicaStopped,
    RequestArrived,
    RequestCancelled,
    Running,
    ShutdownAsked,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.invariants import EffectAudit, check
from rota.core.scheduler import Scheduler
from rota.core.state import Replica
from rota.core.types import Device, LeaseClaim, Model, Phase, Placement, Preload, Scaling

HERE = Path(__file__).parent / "transcripts"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    told = path.read_text(encoding="utf-8")
    played = "".join(_play(told))
    if request.config.getoption("--rewrite", False):
        path.write_text(played, encoding="utf-8")
    else:
        assert played == told


def _play(text: str) -> Iterator[str]:
    """The same file with what really comes of each block."""
    stage = Stage()
    for block in text.rstrip("\n").split("\n\n"):
        head, *_ = block.split("\n----", 1)
        yield head + "\n"
        commands = [line for line in head.splitlines() if line and not line.startswith("#")]
        if commands:
            yield "----\n"
            for command in commands:
                yield from (line + "\n" for line in stage.do(command))
        yield "\n"


class Stage:
    """A scheduler, a clock, and commands in words."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.rounds = 0
        self.now_known()
        self._scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = Scheduler(self.models, coexistence=self.rules())
            self.audit = EffectAudit(self.models, self.rules())
        return self._scheduler

    def now_known(self) -> None:
        """No model and no rule so far."""
        self.models: list[Model] = []
        self.groups: list[Group] = []
        self.sets: list[tuple[str, str]] = []
        self.costs: dict[str, int] = {}

    def rules(self) -> Coexistence:
        if self.sets:
            return Matrix(tuple(self.sets), {}, self.costs)
        return Groups(tuple(self.groups)) if self.groups else FREE

    def do(self, command: str) -> Iterator[str]:
        verb, *words = command.split()
        match verb:
            case "model":
                self.models.append(_model(words[0], words[1:]))
            case "group":
                self.groups.append(_group(words[0], words[1].split(","), words[2:]))
            case "set":
                self.sets.append((words[0], " ".join(words[1:])))
            case "cost":
                self.costs[words[0]] = int(words[1])
            case "other":
                assert self.scheduler
                self.now_known()
            case "change":
                yield from self._feed(ModelsChanged(tuple(self.models), self.rules()))
            case "wait":
                yield from self._wait(self.now_ms + _ms(words[0]))
            case "agent":
                yield from self._agent(words[0], words[1], _ms(words[2]), int(words[3]))
            case "state":
                yield from self._state()
            case _:
                yield from self._feed(_event(verb, words))

    def _wait(self, until_ms: int) -> Iterator[str]:
        while (wake_ms := self.scheduler.next_wake_ms()) is not None and wake_ms <= until_ms:
            self.now_ms = wake_ms
            yield from self._feed(TimePassed())
        self.now_ms = until_ms

    def _agent(self, model: str, caller: str, every_ms: int, rounds: int) -> Iterator[str]:
        for _ in range(rounds):
            self.rounds += 1
            request = f"{caller}{self.rounds}"
            said = [*self._feed(RequestArrived(request, model, caller))]
            said += self._wait(self.now_ms + every_ms // 2)
            said += self._feed(GrantEnded(request, Outcome.OK, is_tool_call=True))
            said += self._wait(self.now_ms + every_ms // 2)
            yield from (line for line in said if f"grant {request} " not in line)

    def _feed(self, event: Event) -> Iterator[str]:
        effects = self.scheduler.step(event, self.now_ms)
        self.audit.watch(event, effects, self.now_ms)
        check(self.scheduler)
        for effect in effects:
            yield f"{self.now_ms / 1_000:g}: {describe(effect)}"

    def _state(self) -> Iterator[str]:
        state = self.scheduler.state
        for name, demand in state.demands.items():
            replicas = " ".join(_say(replica) for replica in demand.replicas.values())
            counts = f"waiting {len(demand.waiting)}, told {len(demand.told)}, "
            counts += f"left {len(demand.left)}"
            counts += ", owed" if any(entry.owed_by for entry in demand.told) else ""
            yield f"{name} {model_state(state, demand)}: {replicas or 'no replica'}, {counts}"


def _say(replica: Replica) -> str:
    leases = f" +{len(replica.leases)} leased" if replica.leases else ""
    return f"{replica.id}({len(replica.grants)}{leases}{' closed' * bool(replica.closed_for)})"


def _joined(node: str, words: list[str]) -> NodeJoined:
    devices, running = [], []
    for name, value in (word.split("=") for word in words):
        if ":" not in value:
            devices.append(Device(name, int(value)))
            continue
        model, device, mib = value.split(":")
        running.append(Running(name, model, Placement(node, (device,), (int(mib),)), Phase.READY))
    return NodeJoined(node, tuple(devices), tuple(running))


def _event(verb: str, words: list[str]) -> Event:
    match [verb, *words]:
        case ["join", *devices]:
            return _joined("n0", devices)
        case ["join-node", node, *devices]:
            return _joined(node, devices)
        case ["lose-node", node]:
            return NodeLost(node)
        case ["job", request, lease, ttl]:
            return GrantEnded(request, Outcome.OK, lease=LeaseClaim(lease, _ms(ttl), "a job"))
        case ["lease", lease, model, caller, ttl, *said]:
            on = next((word[3:] for word in said if word.startswith("on=")), None)
            return LeaseAsked(lease, model, caller, _ms(ttl), load="load" in said, replica=on)
        case ["renew", lease, ttl]:
            return LeaseRenewed(lease, _ms(ttl))
        case ["release", lease]:
            return LeaseReleased(lease)
        case ["silent", replica]:
            return ReplicaSilent(replica, "no probe was answered for 60 s")
        case ["pin" | "unpin", model]:
            return PinAsked(model, verb == "pin")
        case ["ask", request, model, caller, *said]:
            return _arrival(request, model, caller, said)
        case ["call", request]:
            return GrantEnded(request, Outcome.OK, is_tool_call=True)
        case ["leave", request]:
            return RequestCancelled(request)
        case ["end", request]:
            return GrantEnded(request, Outcome.OK)
        case ["end", request, outcome]:
            return GrantEnded(request, Outcome(outcome))
        case ["ready", replica]:
            return ReplicaReady(replica)
        case ["gone", replica]:
            return ReplicaStopped(replica, StopCause.ASKED)
        case ["gone", replica, *cause]:
            return ReplicaStopped(replica, StopCause(" ".join(cause)), "out of memory")
        case ["lost", replica, *saying]:
            return ReplicaStopped(replica, StopCause.REFUSED, " ".join(saying), permanent=True)
        case ["load", request, model]:
            return LoadAsked(request, model)
        case ["unload", model, grace]:
            return UnloadAsked(None if model == "all" else model, _ms(grace))
        case ["shutdown", grace]:
            return ShutdownAsked(_ms(grace))
        case _:
            raise AssertionError(f"no such command: {verb} {words}")


def _arrival(request: str, model: str, caller: str, said: list[str]) -> RequestArrived:
    priority = next((int(word[9:]) for word in said if word.startswith("priority=")), None)
    said = [word for word in said if not word.startswith("priority=")]
    stated = {name: _ms(value) for name, _, value in (word.rpartition("=") for word in said)}
    wait_ms = stated.pop("", None)
    caller, _, mark = caller.partition("/")
    arrival = RequestArrived(
        request=request,
        model=model,
        caller=caller,
        mark=int(mark or 0),
        activation_wait_ms=wait_ms,
        queue_wait_ms=wait_ms,
        hold_ms=stated.pop("hold", None),
        patience_ms=stated.pop("patience", None),
        priority=priority,
    )
    assert not stated, stated
    return arrival


def _group(name: str, members: list[str], words: list[str]) -> Group:
    return Group(
        name,
        frozenset(members),
        swap="together" not in words,
        exclusive="guest" not in words,
        persistent="persistent" in words,
    )


def _model(name: str, words: list[str]) -> Model:
    flags = {word for word in words if "=" not in word}
    said = dict(word.split("=") for word in words if "=" in word)
    memory = said.pop("memory", "8")
    low, high = int(said.pop("min", "0")), int(said.pop("max", "1"))
    model = Model(
        name=name,
        scaling=Scaling(low, high, _ms(said.pop("idle", "600"))),
        memory_mib=None if memory == "whole" else int(memory),
        device_count=int(said.pop("devices", "1")),
        slots=int(said.pop("slots", "1")),
        queue_max=int(said.pop("queue", "1000")),
        activation_wait_ms=_ms(said.pop("wait", "45")),
        patience_ms=_ms(said.pop("patience", "300")),
        hold_ms=_ms(said.pop("hold", "0")),
        hold_finished_ms=_ms(said.pop("hold_finished", "0")),
        load_ms=_ms(said.pop("load")) if "load" in said else None,
        priority=int(said.pop("priority", "0")),
        is_pinned="pinned" in flags,
        is_exclusive_while_busy="exclusive" in flags,
        rejects_when_full="rejects" in flags,
        scale_up_after_ms=_ms(said.pop("more", "5")),
        preload=Preload(said.pop("preload", "never")),
    )
    assert not said, said
    assert flags <= {"pinned", "exclusive", "rejects"}, flags
    return model


def _ms(seconds: str) -> int:
    return round(float(seconds) * 1_000)
