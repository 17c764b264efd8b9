"""What a node does when models are to be run in another way: from the next start on, it does so.
How: a real node on fake engines, configured anew while they run."""

from __future__ import annotations

from pathlib import Path

from rota.config.values import UrlEngine
from rota.core.events import ReplicaReady
from tests.node.support import fake, model, scene


async def test_what_runs_stays_and_the_next_start_is_another(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--tokens", "1"))) as it:
        first = await it.up("a")
        pid = it.pid(first)
        it.node.configure({"a": model("a", fake("--tokens", "2"))})
        assert it.pid(first) == pid
        second = await it.up("a")
        commands = [it.node.facts(replica) for replica in (first, second)]
        assert [facts.command[-1] for facts in commands if facts] == ["1", "2"]
        assert [facts.is_outdated for facts in commands if facts] == [True, False]


async def test_a_model_that_is_gone_has_no_obstacle_and_its_replica_ends(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        replica = await it.up("a")
        it.node.configure({})
        assert it.node.obstacle("a") == ""
        it.stop(replica)
        assert (await it.stopped()).replica == replica


async def test_someone_elses_server_is_asked_at_its_new_url(tmp_path: Path) -> None:
    engines = {name: model(name, fake()) for name in "ab"}
    async with scene(tmp_path, *engines.values()) as it:
        ports = [it.node.endpoint(await it.up(name)).port for name in "ab"]
        urls = [UrlEngine(f"http://127.0.0.1:{port}", "/health") for port in ports]
        it.node.configure({**engines, "far": model("far", urls[0])})
        far = await it.up("far")
        assert it.node.endpoint(far).port == ports[0]
        it.node.configure({**engines, "far": model("far", urls[1])})
        assert it.node.endpoint(far).port == ports[1]

        starting = it.start("far")  # and one that is pointed elsewhere while it is probed
        it.node.configure({**engines, "far": model("far", urls[0])})
        assert await it.next() == ReplicaReady(starting)
        assert it.node.endpoint(starting).port == ports[0]
