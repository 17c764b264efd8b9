"""What: the controller carries decisions out and loses no caller, whatever happens when.
How: the real scheduler under the real loop, over a cluster that only writes orders down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rota.config.values import CommandEngine, Config, ModelConfig
from rota.controller import Controller, GrantHandle
from rota.core.effects import Effect, Start, Stop
from rota.core.events import (
    Event,
    LeaseReleased,
    ModelsChanged,
    NodeJoined,
    NodeLost,
    Outcome,
    ReplicaReady,
    ReplicaStopped,
    RequestArrived,
    Running,
    StopCause,
    TimePassed,
    UnloadAsked,
)
from rota.core.scheduler import Scheduler
from rota.core.types import Device, Model, Phase, Scaling
from rota.engines.base import Endpoint
from rota.errors import CapacityError, ReplicaError, RequestError, RotaError
from rota.journal import first_difference
from rota.journal.file import load
from rota.node.node import Facts
from rota.store import LeaseKeeper


class RecordingCluster:
    """A fake: 1,000 MiB on one device; the test says what becomes of each order."""

    def __init__(self) -> None:
        self.orders: list[Start | Stop] = []
        self.gone: set[str] = set()
        self.running: dict[str, Running] = {}
        self.is_closed = False

    async def open(self, post: Callable[[Event], None]) -> None:
        self.post = post
        self.post(self.joined()[0])

    def joined(self) -> list[NodeJoined]:
        running = tuple(self.running.values())
        return [NodeJoined("local", (Device("cpu", 1_000),), running)]

    async def close(self) -> None:
        self.is_closed = True

    def configure(self, config: Config) -> None:
        self.config = config

    def obstacle(self, model: str) -> str:
        return ""

    def start(self, order: Start) -> None:
        self.orders.append(order)
        running = Running(order.replica, order.model, order.placement, Phase.STARTING)
        self.running[order.replica] = running

    def stop(self, order: Stop) -> None:
        self.orders.append(order)
        self._enter(order.replica, Phase.STOPPING)

    def _enter(self, replica: str, phase: Phase) -> None:
        self.running[replica] = replace(self.running[replica], phase=phase)

    def heard(self, replica: str) -> None:
        pass

    def endpoint(self, replica: str) -> Endpoint:
        if replica in self.gone:
            raise ReplicaError("gone", code="replica_gone", status=502)
        return Endpoint("127.0.0.1", 1)

    def facts(self, replica: str) -> Facts | None:
        return None

    def ready(self, replica: str) -> None:
        self._enter(replica, Phase.READY)
        self.post(ReplicaReady(replica))

    def stopped(self, replica: str, cause: StopCause = StopCause.ASKED, detail: str = "") -> None:
        self.running.pop(replica, None)
        self.post(ReplicaStopped(replica, cause, detail))

    def last(self) -> Start | Stop:
        return self.orders[-1]


def entry(name: str, **facts: object) -> ModelConfig:
    defaults: dict[str, object] = {"scaling": Scaling(0, 1, 600_000), "memory_mib": 600, "slots": 2}
    return ModelConfig(
        model=Model(name, **(defaults | facts)),  # type: ignore[arg-type]
        engine=CommandEngine(("true",)),
        aliases=(f"{name}-alias",),
    )


@asynccontextmanager
async def running(
    *entries: ModelConfig, state_dir: Path = Path("state"), leases: LeaseKeeper | None = None
) -> AsyncIterator[tuple[Controller, RecordingCluster]]:
    cluster = RecordingCluster()
    models = {entry.name: entry for entry in entries}
    config = Config("127.0.0.1", 0, models, state_dir=state_dir)
    async with Controller(config, cluster, leases) as controller:
        yield controller, cluster
    assert cluster.is_closed


class Asker:
    """One request in a task of its own, held until `finish`."""

    def __init__(self, controller: Controller, model: str, request: str = "q") -> None:
        self.handle: GrantHandle | None = None
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._ask(controller, model, request))

    async def _ask(self, controller: Controller, model: str, request: str) -> None:
        async with controller.grant(request=request, model=model, caller="peer:t") as handle:
            self.handle = handle
            await self.may_end.wait()

    async def finish(self) -> None:
        self.may_end.set()
        await self.task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_cold_request_is_granted_when_its_replica_is_ready() -> None:
    async with running(entry("a")) as (controller, cluster):
        asker = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: asker.handle is not None)
        assert asker.handle is not None
        assert (asker.handle.replica, asker.handle.loaded) == ("r1", True)
        await asker.finish()


async def test_one_request_id_used_twice_at_once_is_two_requests() -> None:
    async with running(entry("a")) as (controller, cluster):
        askers = [Asker(controller, "a", "same") for _ in range(2)]
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: all(asker.handle for asker in askers))
        for asker in askers:
            await asker.finish()


async def test_a_caller_that_leaves_the_queue_costs_no_slot() -> None:
    async with running(entry("a", slots=1)) as (controller, cluster):
        first = Asker(controller, "a", "one")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: first.handle is not None)
        second, third = Asker(controller, "a", "two"), Asker(controller, "a", "three")
        await asyncio.sleep(0)
        second.task.cancel()
        await until(second.task.done)
        await first.finish()
        await until(lambda: third.handle is not None)
        await third.finish()


async def test_cancelled_in_the_instant_of_the_grant_gives_the_slot_back() -> None:
    async with running(entry("a", slots=1)) as (controller, cluster):
        asker = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")  # the future is done, its task has not run
        asker.task.cancel()
        await until(asker.task.done)
        assert asker.handle is None
        after = Asker(controller, "a")
        await until(lambda: after.handle is not None)
        await after.finish()


async def test_ending_twice_is_ending_once() -> None:
    async with running(entry("a", slots=1)) as (controller, cluster):
        asker = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: asker.handle is not None)
        assert asker.handle is not None
        asker.handle.end(Outcome.OK)
        asker.handle.end(Outcome.FAILED)
        await asker.finish()
        model = controller.status()["models"][0]  # type: ignore[index]
        assert model["replicas"][0]["in_flight"] == 0


async def test_status_is_as_of_now_however_long_nothing_has_happened() -> None:
    async with running(entry("a")) as (controller, cluster):
        asker = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await asker.finish()

        def idle_s() -> float:
            model = controller.status()["models"][0]  # type: ignore[index]
            return model["replicas"][0]["idle_s"]  # type: ignore[no-any-return]

        await until(lambda: idle_s() > 0)


async def test_last_words_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(entry("a")) as (controller, cluster):
        asker = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        cluster.stopped("r1", StopCause.CRASHED, "no such flag")
        with pytest.raises(CapacityError, match="no such flag"):
            await asker.finish()
    said = [message for message in caplog.messages if "no such flag" in message]
    assert said[0] == "r1 is gone (crashed): no such flag"
    assert all(message.count("no such flag") == 1 for message in said)


async def test_a_replica_gone_before_it_is_looked_up_is_a_502_and_no_leak() -> None:
    async with running(entry("a", slots=1)) as (controller, cluster):
        cluster.gone.add("r1")
        asker = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        with pytest.raises(ReplicaError) as caught:
            await asker.task
        assert caught.value.status == 502
        assert isinstance(cluster.last(), Stop)  # whoever asks next is not sent there too
        cluster.stopped("r1")
        after = Asker(controller, "a")
        await until(lambda: isinstance(cluster.last(), Start))
        cluster.ready("r2")
        await until(lambda: after.handle is not None)
        await after.finish()


@pytest.mark.parametrize(
    ("model", "error", "status", "code", "retry"),
    [
        ("nix", RequestError, 404, "model_not_found", None),
        ("off", RequestError, 409, "model_off", False),
        ("huge", ReplicaError, 500, "model_failed", False),
    ],
)
async def test_what_is_known_at_once_is_said_at_once(
    model: str, error: type[Exception], status: int, code: str, retry: bool | None
) -> None:
    off, huge = entry("off", scaling=Scaling(0, 0, 0)), entry("huge", memory_mib=5_000)
    async with running(off, huge) as (controller, cluster):
        with pytest.raises(error) as caught:
            await Asker(controller, model).task
        said = caught.value
        assert (said.status, said.code, said.retry) == (status, code, retry)  # type: ignore[attr-defined]
        assert not cluster.orders


async def test_a_load_too_long_is_told_with_its_estimate() -> None:
    async with running(entry("a", activation_wait_ms=20, load_ms=9_000)) as (controller, _):
        with pytest.raises(CapacityError) as caught:
            await Asker(controller, "a").task
        said = caught.value
        assert (said.status, said.code) == (503, "model_loading")
        assert said.retry_after_s in range(9, 11)
        assert said.loading is not None
        assert said.loading["model"] == "a"
        assert said.loading["state"] == "loading"


async def test_load_waits_until_ready_and_goes_on_without_its_asker() -> None:
    async with running(entry("a")) as (controller, cluster):
        asked = asyncio.create_task(controller.load("a"))
        await until(lambda: len(cluster.orders) == 1)
        asked.cancel()
        await until(asked.done)
        again = asyncio.create_task(controller.load("a"))
        await asyncio.sleep(0)
        assert len(cluster.orders) == 1
        cluster.ready("r1")
        assert await again == "r1"


async def test_asking_again_for_a_load_that_waits_joins_it() -> None:
    async with running(entry("a")) as (controller, cluster):
        for _ in range(50):
            controller.ask_load("a")
        loading = [asyncio.ensure_future(controller.load("a")) for _ in range(2)]
        await asyncio.sleep(0)
        loading[0].cancel()
        queue = cast("list[dict[str, object]]", controller.queue()["queue"])
        assert [row["wants"] for row in queue] == ["load"]
        cluster.ready("r1")
        assert await loading[1] == "r1"
        controller.ask_load("a")
        assert await controller.load("a") == "r1"


async def test_ask_load_refuses_what_is_off_and_does_not_wait_for_the_rest() -> None:
    async with running(entry("a"), entry("off", scaling=Scaling(0, 0, 0))) as (
        controller,
        cluster,
    ):
        with pytest.raises(RequestError):
            controller.ask_load("off")
        controller.ask_load("a")
        assert isinstance(cluster.last(), Start)
        cluster.stopped("r1", StopCause.CRASHED, "it broke")


async def test_unload_waits_for_the_process_and_answers_those_who_wait() -> None:
    async with running(entry("a")) as (controller, cluster):
        waiting = Asker(controller, "a")
        await until(lambda: len(cluster.orders) == 1)
        unload = asyncio.create_task(controller.unload("a"))
        with pytest.raises(CapacityError) as caught:
            await waiting.task
        assert caught.value.code == "model_unloaded"
        assert isinstance(cluster.last(), Stop)
        assert not unload.done()
        cluster.stopped("r1")
        await unload
        with pytest.raises(RequestError):
            await controller.unload("nix")


async def test_shutdown_lets_work_end_and_answers_the_rest() -> None:
    async with running(entry("a", slots=1)) as (controller, cluster):
        busy = Asker(controller, "a", "one")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: busy.handle is not None)
        queued = Asker(controller, "a", "two")
        await asyncio.sleep(0)
        ending = asyncio.create_task(controller.shutdown(grace_ms=60_000))
        with pytest.raises(CapacityError) as caught:
            await queued.task
        assert caught.value.code == "shutting_down"
        assert len(cluster.orders) == 1
        await busy.finish()
        await until(lambda: isinstance(cluster.last(), Stop))
        cluster.stopped("r1")
        await ending


# ── the journal ──────────────────────────────────────────────────────────────────────────────


@contextmanager
def broken_on(kind: type, *, is_late: bool = False) -> Iterator[None]:
    """A scheduler that raises on events of a kind, for as long as the block runs.

    Args:
        is_late: only when all is done and nothing told.
    """
    step = Scheduler.step

    def broken(self: Scheduler, event: Event, now_ms: int) -> list[Effect]:
        if isinstance(event, kind):
            if is_late:
                step(self, event, now_ms)
            raise AssertionError(f"no {kind.__name__} today")  # noqa: TRY004 - as the core would
        return step(self, event, now_ms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "step", broken)
        yield


async def test_a_scheduler_that_breaks_fails_one_request_and_saves_how_it_came_to_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        with broken_on(RequestArrived):
            for request in ("one", "two"):
                with pytest.raises(AssertionError, match="no RequestArrived today"):
                    await Asker(controller, "a", request).task
        (path,) = (tmp_path / "journals").iterdir()  # the second within a minute is not saved
        saved = load(path)
        assert saved.recording.steps[-1].raised == "AssertionError: no RequestArrived today"
        assert str(path) in caplog.text
        asker = Asker(controller, "a", "three")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: asker.handle is not None)
        await asker.finish()


async def test_whoever_reports_a_fact_that_the_scheduler_breaks_on_goes_on(tmp_path: Path) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        with broken_on(ReplicaReady):
            asyncio.get_running_loop().call_soon(controller.ask_load, "a")
            await until(lambda: len(cluster.orders) == 1)
            cluster.ready("r1")
        cluster.ready("r1")
        assert await controller.load("a") == "r1"


async def test_a_scheduler_that_takes_over_loses_nothing_that_runs_or_waits(
    tmp_path: Path,
) -> None:
    """One is served, one waits for its slot, a lease stands, a model is pinned; then it breaks."""
    async with running(entry("a", slots=1), entry("b"), state_dir=tmp_path) as (
        controller,
        cluster,
    ):
        first, second = Asker(controller, "a", "first"), Asker(controller, "a", "second")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: first.handle is not None)
        lease = await controller.lease(model="a", caller="ann", ttl_ms=60_000, reason="a render")
        controller.pin("a", is_pinned=True)
        with broken_on(TimePassed):
            controller.post(TimePassed())
        (row,) = controller.leases()
        assert (row["lease"], row["replica"], row["reason"]) == (lease.id, "r1", "a render")
        (model, _) = cast("list[dict[str, object]]", controller.status()["models"])
        assert model["pinned"]
        assert second.handle is None
        assert len(cluster.orders) == 1  # nothing is started anew
        await first.finish()
        await until(lambda: second.handle is not None)
        await second.finish()
        end = controller.lease_end(lease.id)
        controller.release_lease(lease.id)
        assert await end == "released"
        await controller.unload("a", wait=False)
        assert cluster.orders[-1].replica == "r1"
        cluster.stopped("r1")
        third = Asker(controller, "a", "third")
        await until(lambda: len(cluster.orders) == 3)
        assert cluster.orders[-1].replica == "r2"  # no id is used again
        cluster.ready("r2")
        await until(lambda: third.handle is not None)
        await third.finish()


async def test_another_configuration_counts_and_nothing_is_lost_for_it(tmp_path: Path) -> None:
    async with running(entry("a"), entry("b"), state_dir=tmp_path) as (controller, cluster):
        asker = Asker(controller, "a", "one")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: asker.handle is not None)
        late = Asker(controller, "b", "late")
        await asyncio.sleep(0)
        after = replace(entry("a"), engine=CommandEngine(("false",)), aliases=("new",))
        config = changed(controller, after, entry("c"))
        controller.reload(config)
        assert (controller.config, cluster.config) == (config, config)
        with pytest.raises(RequestError) as caught:
            await late.task
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        models = cast("list[dict[str, object]]", controller.status()["models"])
        assert [(m["name"], m["aliases"]) for m in models] == [("a", ["new"]), ("c", ["c-alias"])]
        assert not asker.task.done()
        assert len(cluster.orders) == 1
        await asker.finish()
        saved = load(await controller.save_journal()).recording
        (event,) = (s.event for s in saved.steps if isinstance(s.event, ModelsChanged))
        assert event.relaunched == {"a"}
        assert first_difference(saved) is None


async def test_a_replica_of_a_model_that_is_gone_is_still_told_of(tmp_path: Path) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        asker = Asker(controller, "a", "one")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: asker.handle is not None)
        controller.reload(changed(controller))
        (model,) = cast("list[dict[str, object]]", controller.status()["models"])
        assert (model["name"], model["removed"], model["aliases"]) == ("a", True, [])
        with pytest.raises(RequestError, match="no model"):
            await controller.load("a")
        await asker.finish()
        assert isinstance(cluster.last(), Stop)
        cluster.stopped("r1")
        assert controller.status()["models"] == []


async def test_a_scheduler_that_breaks_on_a_configuration_is_followed_by_one_that_has_it(
    tmp_path: Path,
) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        asker = Asker(controller, "a", "one")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: asker.handle is not None)
        with broken_on(ModelsChanged), pytest.raises(AssertionError, match="no ModelsChanged"):
            controller.reload(changed(controller, entry("b")))
        models = cast("list[dict[str, object]]", controller.status()["models"])
        assert [m["name"] for m in models if not m["removed"]] == ["b"]
        assert not asker.task.done()  # what ran runs on, though its model is gone
        await asker.finish()
        assert isinstance(cluster.last(), Stop)
        cluster.stopped("r1")
        other = Asker(controller, "b", "two")
        await until(lambda: len(cluster.orders) == 3)
        cluster.ready(cluster.last().replica)
        await until(lambda: other.handle is not None)
        await other.finish()


def changed(controller: Controller, *entries: ModelConfig) -> Config:
    return replace(controller.config, models={entry.name: entry for entry in entries})


async def test_a_second_break_at_once_is_mended_too(tmp_path: Path) -> None:
    """It cost the order to start a replica; without another scheduler nobody would start it."""
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        with broken_on(TimePassed):
            controller.post(TimePassed())
        with broken_on(NodeLost, is_late=True):
            asker = Asker(controller, "a", "one")
            await asyncio.sleep(0)
            cluster.orders.clear()  # as if its order had been lost with the step
            cluster.running.clear()
            controller.post(NodeLost("nowhere"))
        assert not cluster.orders
        await until(lambda: bool(cluster.orders))
        started = cluster.orders[0].replica
        cluster.ready(started)
        await until(lambda: asker.handle is not None)
        await asker.finish()


async def test_a_lease_that_a_new_scheduler_takes_over_is_the_same_one(tmp_path: Path) -> None:
    keeper = Keeper()
    async with running(entry("a"), state_dir=tmp_path, leases=keeper) as (controller, cluster):
        controller.ask_load("a")
        cluster.ready("r1")
        lease = await controller.lease(model="a", caller="ann", ttl_ms=60_000)
        with broken_on(TimePassed):
            controller.post(TimePassed())
        assert controller.leases()[0]["caller"] == "ann"
        found = controller.find_lease(lease.id)
        assert found is not None
        assert found["caller"] == "ann"
        controller.release_lease(lease.id)
        assert controller.find_lease(lease.id) is None
        assert [what for what, *_ in keeper.said] == ["taken", "ended"]


@pytest.mark.parametrize("loses", ["the lease", "its replica"])
async def test_a_lease_that_a_break_has_cost_is_said_to_be_over(tmp_path: Path, loses: str) -> None:
    """Its end was decided and never told, or its replica has gone unheard of."""
    keeper = Keeper()
    async with running(entry("a"), state_dir=tmp_path, leases=keeper) as (controller, cluster):
        controller.ask_load("a")
        cluster.ready("r1")
        lease = await controller.lease(model="a", caller="ann", ttl_ms=60_000)
        end = controller.lease_end(lease.id)
        if loses == "its replica":
            del cluster.running["r1"]
            with broken_on(TimePassed):
                controller.post(TimePassed())
        else:
            with broken_on(LeaseReleased, is_late=True), pytest.raises(AssertionError):
                controller.release_lease(lease.id)
        assert await end == "its scheduler broke"
        assert controller.leases() == []
        assert keeper.said[-1] == ("ended", lease.id, "its scheduler broke")


async def test_leases_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.controller.controller.LEASES_MAX", 2)
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        controller.ask_load("a")
        cluster.ready("r1")
        leases = [await controller.lease(model="a", caller="ann", ttl_ms=60_000) for _ in range(2)]
        with pytest.raises(CapacityError) as caught:
            await controller.lease(model="a", caller="ann", ttl_ms=60_000)
        assert (caught.value.code, caught.value.status) == ("queue_full", 429)
        assert caught.value.retry_after_s
        await controller.lease(model="a", caller="ann", ttl_ms=60_000, replica="r1")
        for lease in leases:
            assert controller.find_lease(lease.id) is not None
            controller.release_lease(lease.id)
            assert controller.find_lease(lease.id) is None
        await controller.lease(model="a", caller="ann", ttl_ms=60_000)


async def test_a_lease_that_is_over_says_why_and_one_that_never_was_is_said_to_be_over(
    tmp_path: Path,
) -> None:
    keeper = Keeper()
    async with running(entry("a"), state_dir=tmp_path, leases=keeper) as (controller, cluster):
        with pytest.raises(RequestError) as caught:
            await controller.lease(model="a", caller="ann", ttl_ms=60_000)
        assert caught.value.code == "not_loaded"
        taking = asyncio.ensure_future(
            controller.lease(model="a", caller="ann", ttl_ms=60_000, load=True)
        )
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        lease = await taking
        assert lease.replica == "r1"
        assert 0 < controller.renew_lease(lease.id, 90_000).expires_in_s <= 90
        end = controller.lease_end(lease.id)
        cluster.stopped("r1", StopCause.CRASHED)
        assert await end == "its replica is gone (crashed)"
        assert await controller.lease_end("lease-nix") == "it is over"
        controller.release_lease(lease.id)
        with pytest.raises(RequestError):
            controller.renew_lease(lease.id, 1_000)
        assert [what for what, *_ in keeper.said] == ["taken", "renewed", "ended"]


async def test_a_lease_that_ends_before_its_caller_hears_of_it_was_had(tmp_path: Path) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        controller.ask_load("a")
        cluster.ready("r1")
        taking = asyncio.ensure_future(
            controller.lease(model="a", caller="ann", ttl_ms=60_000, load=True)
        )
        await asyncio.sleep(0)  # it is had, and its caller not yet told
        assert controller.leases()
        cluster.stopped("r1", StopCause.CRASHED)
        assert (await taking).replica == "r1"
        assert controller.find_lease(taking.result().id) is None


async def test_a_lease_whose_caller_left_is_taken_from_nobody(tmp_path: Path) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        taking = asyncio.ensure_future(
            controller.lease(model="a", caller="ann", ttl_ms=60_000, load=True)
        )
        await until(lambda: len(cluster.orders) == 1)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        cluster.ready("r1")
        assert not controller.leases()


class Keeper:
    """A fake `LeaseKeeper` that only listens."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def taken(
        self, lease: str, model: str, replica: str, caller: str, reason: str, ttl_ms: int
    ) -> None:
        self.said.append(("taken", lease, model, replica, caller, reason, ttl_ms))

    def renewed(self, lease: str, ttl_ms: int) -> None:
        self.said.append(("renewed", lease, ttl_ms))

    def ended(self, lease: str, why: str) -> None:
        self.said.append(("ended", lease, why))


async def test_an_unload_that_the_scheduler_breaks_on_fails_at_once(tmp_path: Path) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, cluster):
        controller.ask_load("a")
        assert cluster.orders
        with broken_on(UnloadAsked), pytest.raises(AssertionError):
            await controller.unload("a")


async def test_a_full_disk_does_not_stop_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "journals").write_text("in the way")
    async with running(entry("a"), state_dir=tmp_path) as (controller, _):
        with broken_on(RequestArrived), pytest.raises(AssertionError):
            await Asker(controller, "a").task
        assert "cannot be saved" in caplog.text
        with pytest.raises(RotaError) as caught:
            await controller.save_journal()
        assert caught.value.code == "state_unusable"


async def test_a_saved_journal_replays(tmp_path: Path) -> None:
    async with running(entry("a"), entry("b"), state_dir=tmp_path) as (controller, cluster):
        first = Asker(controller, "a", "one")
        await until(lambda: len(cluster.orders) == 1)
        cluster.ready("r1")
        await until(lambda: first.handle is not None)
        await first.finish()
        controller.ask_load("b")
        path = await controller.save_journal()
        assert first_difference(load(path).recording) is None
        story = (await controller.explain("one"))["requests"][0]  # type: ignore[index]
        assert story["state"] == "over"
        with pytest.raises(RequestError) as caught:
            await controller.explain("nobody")
        assert (caught.value.status, caught.value.code) == (404, "request_not_found")


async def test_looking_at_it_does_not_fill_the_journal(tmp_path: Path) -> None:
    async with running(entry("a"), state_dir=tmp_path) as (controller, _):
        before = await controller.save_journal()
        for _ in range(50):
            controller.status()
            assert controller.queue() == {"queue": []}
        after = await controller.save_journal()
        assert load(after).recording.steps == load(before).recording.steps
