"""The verbs that keep a model where it is.

How: a small HTTP server on a free port answers what each test tells it to.
"""

from __future__ import annotations

import json

import pytest

from tests.cli.test_client import STATUS, fake, refusal, run

TAKEN = {"lease": "a1", "model": "smol", "replica": "r1", "expires_in_s": 600.0}
ENDED = {
    "lease": "a0",
    "model": "smol",
    "replica": "r1",
    "caller": "peer:127.0.0.1",
    "reason": "a render",
    "taken_at": "2026-01-01T00:00:00+00:00",
    "ended_at": "2026-01-01T00:01:00+00:00",
    "lasted_s": 60.0,
    "state": "ended",
    "why": "expired",
}
ACTIVE = {
    **TAKEN,
    "caller": "peer:127.0.0.1",
    "reason": "a \x1b[2J render",
    "age_s": 1.0,
    "state": "active",
}


def test_lease_prints_its_id_alone() -> None:
    with fake(leases=(201, TAKEN)) as server:
        result = run(server, "lease", "smol", "--ttl", "1h30m", "--reason", "a render")
    assert (result.exit_code, result.stdout) == (0, "a1\n")
    assert result.stderr == "smol is leased (r1) for 10 min 0 s\n"
    assert server.asked == ["POST /rota/v1/leases"]
    assert server.bodies == [
        {"model": "smol", "ttl_s": 5400.0, "reason": "a render", "load": False}
    ]


def test_lease_for_programs() -> None:
    with fake(leases=(201, TAKEN)) as server:
        result = run(server, "lease", "smol", "--json")
    assert json.loads(result.stdout) == TAKEN
    assert server.bodies == [{"model": "smol", "ttl_s": 600.0, "reason": "", "load": False}]


def test_lease_of_a_model_that_is_not_there() -> None:
    with fake(leases=(409, refusal("not_loaded", "`load: true` would do"))) as server:
        result = run(server, "lease", "smol")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: smol is not loaded; --load brings it up first\n"


def test_lease_waits_for_a_load_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake(leases=(503, refusal("model_loading", "")), status=(200, STATUS)) as server:

        def later(_seconds: float) -> None:
            server.answers["/rota/v1/leases"] = (201, TAKEN)

        monkeypatch.setattr("rota.cli.leases.time.sleep", later)
        result = run(server, "lease", "smol", "--load")
    assert (result.exit_code, result.stdout) == (0, "a1\n")
    assert server.asked.count("POST /rota/v1/leases") == 2


def test_lease_gives_up_on_what_waiting_cannot_mend() -> None:
    with fake(leases=(503, refusal("no_room", "no room")), status=(200, STATUS)) as server:
        result = run(server, "lease", "smol", "--load")
    assert result.exit_code == 3
    assert "error: no room" in result.stderr


def test_renew() -> None:
    with fake(leases__a1__renew=(200, TAKEN)) as server:
        result = run(server, "lease", "--renew", "a1", "--ttl", "90s")
    assert (result.exit_code, result.stdout) == (0, "a1\n")
    assert "stays leased" in result.stderr
    assert server.bodies == [{"ttl_s": 90.0}]


def test_release() -> None:
    with fake(leases__a0__release=(200, ENDED)) as server:
        result = run(server, "release", "a0")
        assert result.stdout == "a0 is over at 2026-01-01T00:01:00+00:00: expired\n"
        assert json.loads(run(server, "release", "a0", "--json").stdout) == ENDED


def test_leases() -> None:
    with fake(leases=(200, {"leases": [ACTIVE], "ended": [ENDED]})) as server:
        lines = run(server, "leases").stdout.splitlines()
        assert lines == [line.rstrip() for line in lines]
        assert lines[0].split() == [
            "LEASE",
            "MODEL",
            "REPLICA",
            "CALLER",
            "AGE",
            "TO",
            "GO",
            "REASON",
        ]
        assert " ".join(lines[1].split()) == (
            "a1 smol r1 peer:127.0.0.1 1.0 s 10 min 0 s a [2J render"
        )
        assert lines[3].split()[0] == "ENDED"
        assert lines[4].split()[-2:] == ["2026-01-01T00:01:00+00:00", "expired"]
        server.answers["/rota/v1/leases"] = (200, {"leases": [], "ended": []})
        assert run(server, "leases").stdout == "nothing is leased\n"
        assert json.loads(run(server, "leases", "--json").stdout) == {"leases": [], "ended": []}


def test_pin_and_unpin() -> None:
    with fake(
        models__smol__pin=(200, {"model": "smol", "pinned": True}),
        models__smol__unpin=(200, {"model": "smol", "pinned": False}),
    ) as server:
        assert "smol is pinned" in run(server, "pin", "smol").stdout
        assert "smol may leave again" in run(server, "unpin", "smol").stdout
        assert json.loads(run(server, "pin", "smol", "--json").stdout)["pinned"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        ("lease",),
        ("lease", "smol", "--renew", "a1"),
        ("lease", "--renew", "a1", "--load"),
        ("lease", "--renew", "a1", "--reason", "x"),
        ("lease", "smol", "--ttl", "10"),
        ("lease", "smol", "--ttl", "0"),
        ("release",),
        ("pin",),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    with fake() as server:
        assert run(server, *arguments).exit_code == 2
        assert server.asked == []
