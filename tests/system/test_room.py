"""What: one model is one process, what fits stays, what is pinned stays, and what works is not
idle. How: a whole rota over fake engines; the machine's own list of processes is asked too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
from websockets.asyncio.client import connect

from rota.config.values import JobsConfig
from rota.core.types import Scaling
from tests.system.rig import ALWAYS, BOUND_S, Fake, Rig, rota, until

ONE = {"gpu0": 1_000}


def said(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])


async def pin(rig: Rig, name: str, verb: str = "pin") -> None:
    assert (await rig.http.post(f"/rota/v1/models/{name}/{verb}")).status_code == 200


# ── one process ──────────────────────────────────────────────────────────────────────────


async def test_a_model_brought_up_in_every_way_at_once_is_one_process(tmp_path: Path) -> None:
    # case H2; kept loaded, loaded by hand, leased and asked for, with room for one of each
    warm = Fake("a", ("--load-s", "0.5"), memory_mib=10, scaling=ALWAYS)
    async with rota(tmp_path, [warm], ONE) as rig:
        by_hand = ["/rota/v1/models/a/load", "/rota/v1/models/a/load?wait=true"] * 3
        claim = {"model": "a", "ttl_s": 60, "load": True}
        answers = await asyncio.gather(
            *map(rig.http.post, by_hand),
            *(rig.chat("a") for _ in range(5)),
            *(rig.http.post("/rota/v1/leases", json=claim) for _ in range(2)),
        )
        statuses = [answer.status_code for answer in answers]
        assert statuses == [202, 200] * 3 + [200] * 5 + [201] * 2
        assert len(rig.processes()["a"]) == 1
        assert rig.model("a")["loads"] == 1
        assert rig.devices.peak_mib() == {"gpu0": 10}


async def test_calls_under_another_name_meet_the_same_process(tmp_path: Path) -> None:
    # case U1; a user interface asks for titles and tags beside the chat that goes on
    chat = Fake("chat", ("--tokens", "40", "--tokens-per-second", "40"), aliases=("title", "tags"))
    async with rota(tmp_path, [chat, Fake("other")], ONE) as rig, rig.begun("chat") as rest:
        for name in ("title", "tags", "title"):
            answer = await rig.chat(name)
            assert answer.status_code == 200
            assert answer.headers["x-rota-model"] == "chat"
            assert answer.headers["x-rota-model-loaded"] == "0"
        assert [line async for line in rest][-2:] == ["data: [DONE]", ""]
        assert rig.processes().keys() == {"chat"}
        assert rig.model("chat")["loads"] == 1


async def test_an_engine_is_asked_for_the_name_that_it_knows(tmp_path: Path) -> None:
    # case W37; the fake engine answers to whatever it is asked for
    fakes = [Fake("a", aliases=("gpt",)), Fake("b", aliases=("o1",), upstream_model="org/B-7B")]
    async with rota(tmp_path, fakes, {"gpu0": 1_200}) as rig:
        for asked, known in (("gpt", "a"), ("a", "a"), ("o1", "org/B-7B"), ("b", "org/B-7B")):
            assert (await rig.chat(asked)).json()["model"] == known


# ── what stays ───────────────────────────────────────────────────────────────────────────


async def test_models_that_fit_together_stay_together(tmp_path: Path) -> None:
    # case W54; nothing is said of groups, only what each takes
    fakes = [Fake("a", memory_mib=300), Fake("b", memory_mib=400), Fake("c", memory_mib=500)]
    async with rota(tmp_path, fakes, ONE) as rig:
        for name in "abab":
            assert (await rig.chat(name)).status_code == 200
        assert [rig.model(name)["loads"] for name in "ab"] == [1, 1]
        assert (await rig.chat("c")).status_code == 200  # one must go, and one is enough
        assert rig.state("c") == "ready"
        assert sorted(rig.state(name) for name in "ab") == ["cold", "ready"]


async def test_a_pin_keeps_one_model_from_leaving_and_from_stepping_down(tmp_path: Path) -> None:
    # cases W54, K8; it is the one used longest ago, and the one that leaves when unpinned
    brief = Scaling(min=0, max=1, idle_timeout_ms=200)
    small = Fake("a", memory_mib=300, scaling=brief)
    async with rota(tmp_path, [small, Fake("b"), Fake("c")], ONE) as rig:
        await pin(rig, "a")
        assert (await rig.chat("a")).status_code == 200
        pid = rig.pid("a")
        for name in "bcbc":
            assert (await rig.chat(name)).status_code == 200
        assert rig.pid("a") == pid
        await pin(rig, "c")
        refused = await rig.chat("b")  # nothing is left but what is pinned
        assert (refused.status_code, said(refused)) == (503, "no_room")
        assert refused.headers["x-should-retry"] == "false"
        assert "a, c may not leave" in refused.json()["error"]["message"]
        assert rig.pid("a") == pid
        await pin(rig, "a", "unpin")
        await until(lambda: rig.state("a") == "cold", "it steps down like any other")


async def test_a_model_pinned_in_the_file_stays(tmp_path: Path) -> None:
    # case K8; a request of another's that would be out of patience at once
    pinned = Fake("a").with_facts(is_pinned=True)
    rival = Fake("b").with_facts(patience_ms=0)
    async with rota(tmp_path, [pinned, rival], ONE) as rig:
        assert (await rig.chat("b")).status_code == 200
        assert (await rig.chat("a")).status_code == 200
        assert (await rig.chat("b")).status_code == 503
        assert rig.state("a") == "ready"


async def test_a_long_think_is_no_idleness(tmp_path: Path) -> None:
    # case K6; silent for six times as long as an idle model stays, before the answer and in it
    thinks = Fake(
        "a",
        ("--first-token-s", "1.2", "--tokens", "2", "--tokens-per-second", "0.8"),
        scaling=Scaling(0, 1, 200),
    )
    async with rota(tmp_path, [thinks], ONE) as rig:
        answer = await rig.chat("a", stream=True)
        assert answer.status_code == 200
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert rig.model("a")["loads"] == 1
        await until(lambda: rig.state("a") == "cold", "and then it does step down")


# ── several devices, several kinds of request ────────────────────────────────────────────


async def test_the_cheapest_set_of_devices_is_cleared_and_the_engine_is_told_which(
    tmp_path: Path,
) -> None:
    # case W53; four cards are full, three are needed, and the one in use every moment stays
    small = [Fake(f"small{n}", memory_mib=800) for n in range(4)]
    big = Fake("big", memory_mib=500).with_facts(device_count=3)
    async with rota(tmp_path, [*small, big], {f"gpu{n}": 1_000 for n in range(4)}) as rig:
        for fake in (*small, *[small[1]] * 5, small[3]):
            assert (await rig.chat(fake.name)).status_code == 200
        assert len(rig.processes()) == 4
        (replica,) = rig.model("small1")["replicas"]
        kept = replica["devices"]
        assert (await rig.chat("big")).status_code == 200
        assert rig.processes().keys() == {"small1", "big"}
        (replica,) = rig.model("big")["replicas"]
        assert set(replica["devices"]) == {f"gpu{n}" for n in range(4)} - set(kept)
        environ = Path(f"/proc/{rig.pid('big')}/environ").read_text().split("\0")
        assert f"CUDA_VISIBLE_DEVICES={','.join(replica['devices'])}" in environ


async def test_one_slot_does_not_lock_kinds_of_requests_out(tmp_path: Path) -> None:
    # case C3; two models in turns on one device, each one request at a time, of every kind
    quick = JobsConfig(keep_ms=0)
    fakes = [Fake(n, ("--job-s", "0"), jobs=quick).with_facts(slots=1) for n in ("a", "b")]
    kinds: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/embeddings": {"input": "hi"},
    }

    async def echo(rig: Rig, name: str) -> bool:
        url = f"{rig.url.replace('http', 'ws', 1)}/v1/realtime?model={name}"
        async with connect(url, proxy=None, open_timeout=BOUND_S) as socket:
            await socket.send("hi")
            return await socket.recv() == "hi"

    async with rota(tmp_path, fakes, ONE) as rig:
        asks = [
            rig.http.post(
                path,
                json={"model": name, "stream": is_streamed} | body,
                headers={"x-conversation-id": f"{number}"},
            )
            for number in range(3)
            for name in ("a", "b")
            for is_streamed in (False, True)
            for path, body in kinds.items()
        ]
        lists = [rig.http.get("/v1/models") for _ in range(6)]
        jobs = [rig.http.post("/v1/videos", json={"model": name}) for name in ("a", "b")]
        answers, echoes = await asyncio.gather(
            asyncio.gather(*asks, *lists, *jobs), asyncio.gather(echo(rig, "a"), echo(rig, "b"))
        )
        assert [answer.status_code for answer in answers] == [200] * (36 + 6 + 2)
        assert all(echoes)
        assert rig.in_flight() == rig.waiting() == 0
