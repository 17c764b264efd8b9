"""What: the file changes while it is served: what runs goes on, what is wrong changes nothing.
How: a whole rota in this process, from a real file that is watched, over fake engines."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rota.cli.reloader import Reloader, Source, beside
from rota.cli.serve import running
from rota.journal import first_difference
from rota.journal.file import load as load_journal
from tests.system.rig import BOUND_S, until

LOOK_S = 0.05
FAKE = f"{sys.executable} -m rota.testing.fake_engine --port ${{PORT}} --name ${{MODEL}}"
STREAM = "--tokens 1000000 --tokens-per-second 20"


@dataclass
class File:
    """A configuration file that is written anew. The models by name, each with its entry."""

    path: Path
    models: dict[str, str] = field(default_factory=dict)
    top: str = ""

    def text(self) -> str:
        entries = "".join(f"  {name}: {{{keys}}}\n" for name, keys in self.models.items())
        state = self.path.parent / "state"
        return (
            f"listen: 127.0.0.1:0\nstate: {state}\ndevices: {{gpu0: {{memory: 10000MiB}}}}\n"
            "defaults: {scaling: {max: 1}, stop_grace: 1s}\n"
            f"{self.top}models:\n{entries}"
        )

    def write(self) -> None:
        """In one step, as editors do."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(self.text())
        draft.replace(self.path)


def fake(knobs: str = "", more: str = "") -> str:
    return f'cmd: "{FAKE} {knobs}", memory: 100MiB{more}'


class Live:
    """A rota that serves a file, and a client of it."""

    def __init__(self, file: File, reloader: Reloader, http: httpx2.AsyncClient) -> None:
        self.file = file
        self.reloader = reloader
        self.http = http

    async def chat(self, model: str) -> httpx2.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        return await self.http.post("/v1/chat/completions", json=body)

    @asynccontextmanager
    async def stream(self, model: str) -> AsyncIterator[AsyncIterator[str]]:
        """A streamed chat whose answer has begun: the lines of the rest."""
        body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = (line async for line in answer.aiter_lines() if line)
            assert (await anext(lines)).startswith("data: ")
            yield lines

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get("/rota/v1/status")).json()
        return answer

    async def model(self, name: str) -> dict[str, Any] | None:
        models = (await self.status())["models"]
        return next((model for model in models if model["name"] == name), None)

    async def replica(self, name: str) -> dict[str, Any] | None:
        model = await self.model(name)
        return model["replicas"][0] if model and model["replicas"] else None

    async def pid(self, name: str) -> int | None:
        replica = await self.replica(name)
        return replica["pid"] if replica else None

    async def reload(self, query: str = "", body: str = "") -> httpx2.Response:
        return await self.http.post(f"/rota/v1/reload{query}", content=body)


@asynccontextmanager
async def live(
    folder: Path, models: dict[str, str], *, top: str = "", is_watched: bool = False
) -> AsyncIterator[Live]:
    file = File(folder / "rota.yaml", models, top)
    file.write()
    loaded = Source(file.path).open()
    async with running(loaded.config, loaded) as rota:
        reloader = rota.reloader
        assert reloader is not None
        works = [reloader.watch(LOOK_S)] if is_watched else []
        limits = httpx2.Limits(max_connections=100)
        async with (
            beside(*works),
            httpx2.AsyncClient(base_url=rota.url, timeout=BOUND_S, limits=limits) as http,
        ):
            yield Live(file, reloader, http)


def loaded_by(reloader: Reloader) -> str:
    return str(reloader.status()["loaded_by"])


async def test_what_stays_runs_on_and_what_goes_ends_first(tmp_path: Path) -> None:
    # cases C1, W23
    models = {"a": fake(STREAM), "b": fake(STREAM), "e": fake()}
    async with live(tmp_path, models) as rota, rota.stream("a") as a:
        async with rota.stream("b") as b:
            assert (await rota.chat("e")).status_code == 200
            pids = [await rota.pid(name) for name in "abe"]
            del rota.file.models["b"]
            rota.file.models |= {"a": fake(f"{STREAM} --slots 7"), "d": fake()}
            rota.file.write()
            answer = (await rota.reload()).json()
            assert (answer["reloaded"], answer["added"], answer["removed"]) == (True, ["d"], ["b"])
            assert answer["changed"] == [{"model": "a", "now": [], "next_start": ["cmd"]}]
            assert answer["unchanged"] == ["e"]

            for lines in (a, b):  # both go on
                for _ in range(3):
                    assert (await anext(lines)).startswith("data: ")
            assert [await rota.pid(name) for name in "abe"] == pids
            assert (await rota.chat("b")).status_code == 404
            names = [m["id"] for m in (await rota.http.get("/v1/models")).json()["data"]]
            assert names == ["a", "e", "d"]
            assert (await rota.chat("d")).status_code == 200
            gone = await rota.model("b")
            assert gone is not None
            assert (gone["removed"], gone["replicas"][0]["phase"]) == (True, "draining")
        await until_none(lambda: rota.model("b"))

        replica = await rota.replica("a")
        assert replica is not None
        assert "--slots" not in replica["command"]
        await rota.http.post("/rota/v1/models/a/unload?wait=true&grace_s=0")
        await rota.http.post("/rota/v1/models/a/load?wait=true")
        replica = await rota.replica("a")
        assert replica is not None
        assert "--slots" in replica["command"]


async def until_none(look: Callable[[], Any]) -> None:
    async with asyncio.timeout(BOUND_S):
        while await look() is not None:
            await asyncio.sleep(0.01)


async def test_a_bad_file_changes_nothing_and_says_why(tmp_path: Path) -> None:
    # case C1
    async with live(tmp_path, {"a": fake()}) as rota:
        assert (await rota.chat("a")).status_code == 200
        pid = await rota.pid("a")
        rota.file.models["b"] = "cmd: true, colour: red"
        rota.file.write()
        answer = await rota.reload()
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert error["code"] == "config_invalid"
        assert f"{rota.file.path}:7:18: unknown key `colour`" in error["message"]
        assert (await rota.chat("b")).status_code == 404
        complaint = (await rota.status())["configuration"]["complaint"]
        assert (complaint["by"], complaint["text"]) == ("request", error["message"])

        rota.file.models["b"] = fake()
        rota.file.write()
        assert (await rota.reload()).json()["added"] == ["b"]
        assert (await rota.status())["configuration"]["complaint"] is None
        assert await rota.pid("a") == pid
        rota.file.path.unlink()
        answer = await rota.reload()
        assert "cannot be read: no such file" in answer.json()["error"]["message"]
        assert (await rota.chat("b")).status_code == 200


async def test_a_dry_run_says_and_does_nothing(tmp_path: Path) -> None:
    async with live(tmp_path, {"a": fake()}) as rota:
        wanted = File(rota.file.path, {"b": fake()}, "hold_max: 1m\n").text()
        answer = (await rota.reload("?dry_run=true", wanted)).json()
        assert (answer["reloaded"], answer["added"], answer["removed"]) == (False, ["b"], ["a"])
        assert answer["file"] == {"now": ["hold_max"], "restart": []}
        assert (await rota.reload("?dry_run=true")).json()["unchanged"] == ["a"]
        assert (await rota.reload("?dry_run=true", "models: {")).status_code == 422
        assert (await rota.reload("", wanted)).status_code == 400
        assert (await rota.reload("?dry_run=true", "#" * (4 << 20) + "##")).status_code == 413
        assert await rota.model("b") is None
        assert loaded_by(rota.reloader) == "start"


async def test_what_needs_a_restart_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    async with live(tmp_path, {"a": fake()}) as rota:
        text = rota.file.text().replace("10000MiB", "9000MiB").replace(":0\n", ":18080\n")
        rota.file.path.write_text(text.replace("  a:", f"  b: {{{fake()}}}\n  a:"))
        for _ in range(2):  # it stays so
            answer = (await rota.reload()).json()
            assert answer["file"]["restart"] == ["listen", "devices"]
            assert "`listen`, `devices`: rota goes on with what it" in answer["warnings"][-1]
        status = await rota.status()
        assert status["configuration"]["needs_restart"] == ["listen", "devices"]
        assert status["devices"][0]["memory_mib"] == 10_000
        assert (await rota.chat("b")).status_code == 200


async def test_keys_are_not_lost_with_an_address_that_stays(tmp_path: Path) -> None:
    sha = "0" * 64
    file = File(tmp_path / "rota.yaml", {"a": fake()}, f"keys: {{me: {{sha256: {sha}}}}}\n")
    file.path.write_text(file.text().replace("127.0.0.1:0", "0.0.0.0:0"))
    loaded = Source(file.path).open()
    async with running(loaded.config, loaded) as rota:
        assert rota.reloader is not None
        file.top = ""  # and back to loopback, which counts later
        file.write()
        with pytest.raises(Exception, match=r"there are no keys(.|\n)*until it is restarted"):
            await rota.reloader.reload()
        assert list(rota.controller.config.keys) == ["me"]


async def test_keys_and_limits_count_at_once(tmp_path: Path) -> None:
    async with live(tmp_path, {"a": fake()}) as rota:
        sha = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of "foo"
        rota.file.top = f"keys: {{me: {{sha256: {sha}}}}}\nbody_bytes_max: 1MiB\n"
        rota.file.write()
        assert (await rota.reload()).json()["file"]["now"] == ["body_bytes_max", "keys"]
        assert (await rota.chat("a")).status_code == 401
        rota.http.headers["authorization"] = "Bearer foo"
        assert (await rota.chat("a")).status_code == 200
        large = {"model": "a", "x": "x" * (1 << 20)}
        assert (await rota.http.post("/v1/completions", json=large)).status_code == 413


async def test_another_url_counts_at_once(tmp_path: Path) -> None:
    async with live(tmp_path, {"a": fake("--tokens 1"), "b": fake("--tokens 2")}) as rota:
        ports = []
        for name in "ab":
            assert (await rota.chat(name)).status_code == 200
            replica = await rota.replica(name)
            assert replica is not None
            ports.append(replica["port"])
        for port, tokens in zip(ports, (1, 2), strict=True):
            rota.file.models["far"] = f'url: "http://127.0.0.1:{port}"'
            rota.file.write()
            assert (await rota.reload()).status_code == 200
            answer = await rota.chat("far")
            assert answer.json()["usage"]["completion_tokens"] == tokens, answer.text


# ── watching ─────────────────────────────────────────────────────────────────────────────


def by_rename(path: Path, text: str) -> None:
    draft = path.with_name("draft")
    draft.write_text(text)
    draft.replace(path)


def in_place(path: Path, text: str) -> None:
    with path.open("r+") as file:
        file.write(text)
        file.truncate()


def by_link(path: Path, text: str) -> None:
    """As Kubernetes swaps a ConfigMap: rota.yaml → ..data/rota.yaml, and ..data → ..2."""
    folder = path.parent
    new = folder / f"..{random.randrange(10**9)}"
    new.mkdir()
    (new / path.name).write_text(text)
    (folder / "..data_tmp").symlink_to(new.name)
    (folder / "..data_tmp").replace(folder / "..data")
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(Path("..data") / path.name)


@pytest.mark.parametrize("replace", [by_rename, in_place, by_link])
async def test_a_change_is_seen_once_however_it_is_made(
    tmp_path: Path, replace: Callable[[Path, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    # case W24
    caplog.set_level("INFO", "rota.reload")
    async with live(tmp_path, {"a": fake()}, is_watched=True) as rota:
        for count, name in enumerate("bcd", 1):
            rota.file.models[name] = fake()
            replace(rota.file.path, rota.file.text())
            await until_loaded(caplog, count)
            os.utime(rota.file.path)
            await looks(rota.reloader)
            assert reloads(caplog) == count
        assert loaded_by(rota.reloader) == "watch"
        assert (await rota.chat("d")).status_code == 200


async def until_loaded(caplog: pytest.LogCaptureFixture, count: int) -> None:
    await until(lambda: reloads(caplog) >= count, "it is loaded")


def reloads(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("loaded again") for record in caplog.records)


async def looks(reloader: Reloader, count: int = 4) -> None:
    """Let the watch look a few times."""
    left = count
    look = reloader._look

    def counted() -> bytes | str:
        nonlocal left
        left -= 1
        return look()

    reloader._look = counted  # type: ignore[method-assign]
    await until(lambda: left <= 0, "it has looked")
    reloader._look = look  # type: ignore[method-assign]


async def test_a_file_that_is_wrong_is_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live(tmp_path, {"a": fake()}, is_watched=True) as rota:
        for text in ("models: {a: {", "models: {a: {cmd: x"):
            rota.file.path.write_text(text)  # half written, and nobody goes on for a while
            await until(lambda: rota.reloader._tried == text.encode(), "it was tried")  # noqa: B023
            await looks(rota.reloader)
        rota.file.path.unlink()
        await until(lambda: "no such file" in str(rota.reloader._tried), "it was missed")
        await looks(rota.reloader)
        said = [r.message for r in caplog.records if r.message.startswith("not loaded again")]
        assert len(said) == 3
        rota.file.models["b"] = fake()
        rota.file.write()
        await until(lambda: rota.reloader.status()["complaint"] is None, "it is loaded")
        assert (await rota.chat("b")).status_code == 200


# ── many ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
async def test_streams_run_through_many_reloads(tmp_path: Path, count: int) -> None:
    # case W23
    kept = [f"kept-{n}" for n in range(4)]
    models = {name: fake(STREAM) for name in kept}
    async with live(tmp_path, models) as rota:
        over = asyncio.Event()
        streams = [asyncio.create_task(_read(rota, kept[n % 4], over)) for n in range(20)]
        await until_ready(rota, kept)
        pids = [await rota.pid(name) for name in kept]
        pace_s = 60 / 100 if count == 100 else 0.0
        rng = random.Random(count)
        for number in range(count):
            await _change(rota, rng, number)
            await asyncio.sleep(pace_s)  # the pace is what is tested: 100 in a minute
        assert [await rota.pid(name) for name in kept] == pids
        over.set()
        lines = await asyncio.gather(*streams)
        assert all(lines)
        journal = (await rota.http.post("/rota/v1/journal")).json()["path"]
        assert first_difference(load_journal(Path(journal)).recording) is None


async def _read(rota: Live, model: str, over: asyncio.Event) -> int:
    """Read a stream until it is over; it must not be before. The lines that came."""
    async with rota.stream(model) as lines:
        count = 0
        async for line in lines:
            assert line.startswith("data: "), line
            assert '"error"' not in line, line
            count += 1
            if over.is_set():
                return count
    raise AssertionError(f"a stream of {model} has ended after {count} lines")


async def until_ready(rota: Live, names: list[str]) -> None:
    async with asyncio.timeout(BOUND_S):
        while {(await rota.model(name) or {}).get("state") for name in names} != {"ready"}:
            await asyncio.sleep(0.05)


async def _change(rota: Live, rng: random.Random, number: int) -> None:
    """One of: a model is added and asked for, one goes, one changes, nothing does, a mistake."""
    file = rota.file
    others = [name for name in file.models if not name.startswith("kept")]
    kind = ["add", "change", "nothing", "broken", "remove"][number % 5]
    if kind == "broken":
        file.path.write_text(file.text() + "  : [\n")
        assert (await rota.reload()).status_code == 422
        return
    if kind == "add":
        file.models[f"other-{number}"] = fake()
    elif kind == "change":
        file.models[rng.choice(others)] = fake(
            f"--slots {number + 1}", f", aliases: [other-{number}]"
        )
        file.models["kept-0"] = fake(f"{STREAM} --slots {number + 10}", ", patience: 1m")
    elif kind == "remove":
        del file.models[rng.choice(others)]
    file.write()
    answer = await rota.reload()
    assert answer.status_code == 200, answer.text
    if kind == "nothing":
        assert not any(answer.json()[what] for what in ("added", "removed", "changed"))
    if kind in ("add", "change"):
        assert (await rota.chat(f"other-{number}")).status_code == 200
