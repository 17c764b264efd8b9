"""Leases from the call to what they keep: real processes, real sockets, and keys before them.

How: the rig's rota over fake engines, of which one fits the device at a time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from rota.config.values import KeyConfig
from tests.system.rig import Fake, Rig, rota, until

LEASES = "/rota/v1/leases"
DEVICE = {"cpu": 1_000}


async def take(rig: Rig, model: str, *, ttl_s: float = 60, **more: Any) -> dict[str, Any]:
    answer = await rig.http.post(LEASES, json={"model": model, "ttl_s": ttl_s, **more})
    assert answer.status_code == 201, answer.text
    taken: dict[str, Any] = answer.json()
    return taken


async def test_a_leased_model_stays_until_its_lease_is_released(tmp_path: Path) -> None:
    fakes = [Fake("a").with_facts(hold_finished_ms=0), Fake("b").with_facts(activation_wait_ms=1)]
    async with rota(tmp_path, fakes, DEVICE) as rig:
        assert (await rig.chat("a")).status_code == 200
        pid = rig.pid("a")
        lease = (await take(rig, "a", reason="a render"))["lease"]
        refused = await rig.chat("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_waiting")
        assert "a is leased: a render" in refused.json()["error"]["message"]
        assert rig.pid("a") == pid
        released = (await rig.http.delete(f"{LEASES}/{lease}")).json()
        assert released["state"] == "ended"
        # The one who was told to come back is loaded for, at once.
        await until(lambda: rig.state("b") == "ready", "b is ready")
        assert rig.state("a") == "cold"
        again = (await rig.http.delete(f"{LEASES}/{lease}")).json()
        assert again == released


async def test_a_lease_that_runs_out_says_so(tmp_path: Path) -> None:
    fakes = [Fake("a").with_facts(hold_finished_ms=0), Fake("b")]
    async with rota(tmp_path, fakes, DEVICE) as rig:
        lease = (await take(rig, "a", ttl_s=0.5, load=True))["lease"]
        assert (await rig.chat("b")).status_code == 200  # it waited
        ended = (await rig.http.get(f"{LEASES}/{lease}")).json()
        assert (ended["state"], ended["why"]) == ("ended", "expired")
        answer = await rig.http.post(f"{LEASES}/{lease}/renew", json={"ttl_s": 1})
        assert answer.status_code == 404
        assert "expired" in answer.json()["error"]["message"]


async def test_a_cold_model_is_leased_only_if_it_may_be_loaded(tmp_path: Path) -> None:
    async with rota(tmp_path, [Fake("a")], DEVICE, lease_ttl_ms_max=120_000) as rig:
        answer = await rig.http.post(LEASES, json={"model": "a", "ttl_s": 60})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_loaded")
        assert rig.state("a") == "cold"
        taken = await take(rig, "a", ttl_s=9_999, load=True)
        assert rig.state("a") == "ready"
        assert 60 < taken["expires_in_s"] <= 120  # the file's bound
        (listed,) = (await rig.http.get(LEASES)).json()["leases"]
        assert (listed["lease"], listed["model"]) == (taken["lease"], "a")


async def test_a_lease_ends_with_its_replica(tmp_path: Path) -> None:
    async with rota(tmp_path, [Fake("a")], DEVICE) as rig:
        lease = (await take(rig, "a", load=True))["lease"]
        answer = await rig.http.post("/rota/v1/models/a/unload?wait=true&grace_s=0")
        assert answer.status_code == 200
        ended = (await rig.http.get(f"{LEASES}/{lease}")).json()
        assert ended["state"] == "ended"
        assert ended["why"]


# case K8
async def test_a_pinned_model_never_leaves(tmp_path: Path) -> None:
    async with rota(tmp_path, [Fake("a"), Fake("b")], DEVICE) as rig:
        assert (await rig.chat("a")).status_code == 200
        assert (await rig.http.post("/rota/v1/models/a/pin")).status_code == 200
        refused = await rig.chat("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
        assert refused.headers["x-should-retry"] == "false"
        assert "a" in refused.json()["error"]["message"]
        assert (await rig.http.post("/rota/v1/models/a/unpin")).status_code == 200
        assert (await rig.chat("b")).status_code == 200


@pytest.mark.parametrize("name", ["alice", "bob"])
async def test_a_key_opens_and_its_name_is_shown(tmp_path: Path, name: str) -> None:
    keys = {
        who: KeyConfig(who, hashlib.sha256(f"sk-{who}".encode()).digest())
        for who in ("alice", "bob")
    }
    async with rota(tmp_path, [Fake("a")], DEVICE, keys=keys) as rig:
        assert (await rig.chat("a")).status_code == 401
        answer = await rig.chat("a", authorization=f"Bearer sk-{name}")
        assert answer.status_code == 200
        story = await rig.controller.explain(answer.headers["x-request-id"])
        assert f"key:{name}" in str(story)
        assert f"sk-{name}" not in str(story)
