"""What a file means, and each mistake with its line and remedy.

How: short files, and the values, problems or warnings that come out, word for word.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from rota.config.addresses import is_own
from rota.config.entry import NAME_RULE
from rota.config.values import CommandEngine, JobsConfig, KeyConfig, LlamaCppEngine, UrlEngine
from rota.core.types import Eviction, Scaling
from tests.config.helpers import complaints, loaded, warnings

CMD = f'cmd: "{sys.executable} -m x ${{PORT}}", memory: 1GiB'


def test_the_smallest_useful_file(tmp_path: Path) -> None:
    (tmp_path / "qwen.gguf").write_bytes(b"GGUF" + bytes(1000))
    config = loaded(
        tmp_path,
        """\
        models:
          qwen:
            {model: qwen.gguf, scaling: {max: 1}}
        """,
    )
    qwen = config.models["qwen"]
    assert (config.host, config.port, config.devices) == ("127.0.0.1", 8080, ())
    assert qwen.engine == LlamaCppEngine(model=tmp_path / "qwen.gguf")
    assert qwen.model.scaling == Scaling(min=0, max=1, idle_timeout_ms=600_000)
    assert qwen.model.slots == 4
    assert qwen.line == 2
    assert config.warnings == ()


def test_every_key_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = loaded(
        tmp_path,
        f"""\
        listen: "[::1]:0"
        state: here
        queue_bytes_max: 1MiB
        body_bytes_max: 2MB
        lease_ttl_max: 2h
        devices: {{g0: {{memory: 24GiB, visible: GPU-1}}, g1: {{memory: 24GiB}}}}
        macros: {{serve: "{sys.executable} -m serve --port ${{PORT}}"}}
        models:
          a:
            cmd: |
              ${{serve}} --name ${{MODEL}} \\
                --title 'two words'
            ready: none
            cwd: run
            cmd_stop: ${{serve}} --end ${{PID}} 'of ${{MODEL}}'
            env: {{KEY: "${{MODEL}}-x"}}
            memory: 1.5GiB
            device_count: 2
            devices: [g0, g1]
            scaling: {{min: 1}}
            concurrency: 3
            queue_max: 0
            queue_wait: 1m
            activation_wait: 1s
            patience: 2s
            start_timeout: 3s
            stop_grace: 0
            priority: -1000
            when_full: reject
            pinned: true
            exclusive_while_busy: true
            aliases: other
            upstream_model: org/Model-7B
        """,
    )
    entry = config.models["a"]
    model = entry.model
    assert (config.host, config.port, config.state_dir) == ("::1", 0, tmp_path / "here")
    assert (config.queue_bytes_max, config.body_bytes_max) == (1024 * 1024, 2_000_000)
    assert config.lease_ttl_ms_max == 7_200_000
    assert entry.engine == CommandEngine(
        argv=(
            *(sys.executable, "-m", "serve", "--port", "${PORT}"),
            *("--name", "${MODEL}", "--title", "two words"),
        ),
        ready=None,
        env={"KEY": "${MODEL}-x"},
        cwd=tmp_path / "run",
        stop_argv=(
            *(sys.executable, "-m", "serve", "--port", "${PORT}"),
            *("--end", "${PID}", "of ${MODEL}"),
        ),
    )
    assert (model.memory_mib, model.device_count) == (1536, 2)
    assert model.devices == frozenset({"g0", "g1"})
    assert model.scaling == Scaling(min=1, max=1, idle_timeout_ms=600_000)
    assert (model.slots, model.queue_max, model.queue_wait_ms) == (3, 0, 60_000)
    assert (model.activation_wait_ms, model.patience_ms) == (1_000, 2_000)
    assert (entry.start_timeout_ms, model.stop_grace_ms) == (3_000, 0)
    assert (model.priority, model.rejects_when_full) == (-1_000, True)
    assert model.is_pinned
    assert model.is_exclusive_while_busy
    assert (entry.aliases, entry.upstream_model) == (("other",), "org/Model-7B")
    assert [device.visible for device in config.devices] == ["GPU-1", None]


def test_someone_elses_url_is_never_off(tmp_path: Path) -> None:
    config = loaded(tmp_path, "models: {far: {url: 'http://10.0.0.7:8000/v0/', ready: /up}}")
    far = config.models["far"]
    assert far.engine == UrlEngine("http://10.0.0.7:8000/v0", "/up")
    assert far.model.is_external
    assert far.model.scaling == Scaling(min=0, max=1, idle_timeout_ms=0)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("defaults", "own", "expected"),
    [
        ("", "", (0, 0, 600_000)),
        ("", "{max: 0}", (0, 0, 600_000)),
        ("", "{max: 2}", (0, 2, 600_000)),
        ("", "{min: 2}", (2, 2, 600_000)),
        ("", "{min: 1, max: 3, idle_timeout: 0}", (1, 3, 0)),
        ("", "{idle_timeout: 5m}", (0, 0, 600_000)),
        ("{max: 1, idle_timeout: 1m}", "", (0, 1, 60_000)),
        ("{max: 1, idle_timeout: 1m}", "{idle_timeout: 5m}", (0, 1, 300_000)),
        ("{max: 1, idle_timeout: 1m}", "{min: 2}", (2, 2, 60_000)),
        ("{min: 1, max: 3}", "{max: 1}", (0, 1, 600_000)),
        ("{max: 1}", "{max: 0}", (0, 0, 600_000)),
    ],
)
def test_partly_stated_scaling(
    tmp_path: Path, defaults: str, own: str, expected: tuple[int, int, int]
) -> None:
    config = loaded(
        tmp_path,
        f"defaults: {{scaling: {defaults or '{}'}}}\n"
        f"models: {{a: {{{CMD}, scaling: {own or '{}'}}}}}",
    )
    assert config.models["a"].model.scaling == Scaling(*expected)


def test_never_is_written_as_0_and_nobody_else_is_never_freed(tmp_path: Path) -> None:
    # case K3
    def entry(timeout: str) -> str:
        return f"models: {{a: {{{CMD}, scaling: {{max: 1{timeout}}}}}}}"

    for timeout, ms in (("", 600_000), (", idle_timeout: 0", 0), (", idle_timeout: 0s", 0)):
        assert loaded(tmp_path, entry(timeout)).models["a"].model.scaling.idle_timeout_ms == ms
    for never in ("never", "-1"):
        [said] = complaints(tmp_path, entry(f", idle_timeout: {never}"))
        assert said.endswith(f"`idle_timeout` is `{never}`; never is written as 0")


def test_what_is_off_is_said(tmp_path: Path) -> None:
    assert warnings(
        tmp_path,
        f"""\
        models:
          a: {{{CMD}}}
          b: {{{CMD}, scaling: {{idle_timeout: 1m}}}}
          c: {{{CMD}, scaling: {{max: 0}}}}
        """,
    ) == [
        "2: `a` states no scaling, so it is off; add `scaling: {max: 1}`",
        "3: `idle_timeout` alone leaves the model off; add `max: 1`",
    ]


def test_defaults_and_what_is_closer(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    config = loaded(
        tmp_path,
        f"""\
        defaults: {{concurrency: 7, stop_grace: 1s, scaling: {{max: 1}}}}
        models:
          a: {{{CMD}}}
          b: {{{CMD}, concurrency: 2, stop_grace: 3s}}
          c: {{model: m.gguf, parallel: 5}}
          d: {{model: m.gguf, concurrency: 6}}
          e: {{url: http://far:1}}
        """,
    )
    slots = {name: entry.model.slots for name, entry in config.models.items()}
    assert slots == {"a": 7, "b": 2, "c": 5, "d": 6, "e": 7}
    assert config.models["a"].model.stop_grace_ms == 1_000
    assert config.models["b"].model.stop_grace_ms == 3_000


def test_who_goes_first_and_who_stays(tmp_path: Path) -> None:
    text = f"""\
    defaults: {{priority: 5, when_full: reject}}
    models:
      a: {{{CMD}, scaling: {{max: 1}}}}
      b: {{{CMD}, scaling: {{max: 1}}, priority: -1, when_full: queue, pinned: true}}
      c: {{{CMD}, scaling: {{max: 0}}, pinned: true}}
      d: {{url: http://far:1, priority: 7}}
    """
    config = loaded(tmp_path, text)
    models = [entry.model for entry in config.models.values()]
    assert [model.priority for model in models] == [5, -1, 5, 7]
    assert [model.rejects_when_full for model in models] == [True, False, True, True]
    assert [model.is_pinned for model in models] == [False, True, True, False]
    assert not any(model.is_exclusive_while_busy for model in models)
    assert config.lease_ttl_ms_max == 3_600_000
    assert warnings(tmp_path, text) == ["5: `pinned` does nothing while the model is off"]


def test_what_decides_who_leaves(tmp_path: Path) -> None:
    models = f"models: {{a: {{{CMD}, scaling: {{max: 1}}}}}}"
    assert loaded(tmp_path, models).eviction is Eviction.VALUE
    assert loaded(tmp_path, f"eviction: lru\n{models}").eviction is Eviction.LRU
    assert complaints(tmp_path, f"eviction: fifo\n{models}") == [
        "1:11: `eviction` is `fifo`; it is `value` or `lru`"
    ]


def test_wrong_words_about_who_goes_first(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        lease_ttl_max: 0
        models:
          a: {cmd: "true ${PORT}", priority: 1001, when_full: wait, pinned: yes}
          b: {url: http://far:1, pinned: true}
          c: {cmd: "true ${PORT}", exclusive_while_busy: 1}
        """,
    ) == [
        "1:16: `lease_ttl_max` is 0; nothing can happen in no time",
        "3:38: `priority` is 1001; it goes from -1000 to 1000",
        "3:55: `when_full` is `wait`; it is `queue` or `reject`",
        "3:69: `pinned` `yes` is neither true nor false",
        "4:26: `pinned` does nothing with `url`; it goes with `cmd` or `model`",
        "5:50: `exclusive_while_busy` `1` is neither true nor false",
    ]


# case L5
def test_a_model_with_nothing_to_run(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        models:
          a:
          b: {scaling: {max: 1}}
          c: {cmd: "true ${PORT}", model: x.gguf}
        """,
    ) == [
        "2:3: `a` has neither `cmd`, `model` nor `url`: nothing to run",
        "3:3: `b` has neither `cmd`, `model` nor `url`: nothing to run",
        "4:35: `c` has both `cmd` and `model`; keep one",
    ]


def test_how_long_a_start_may_take_and_an_engine_be_silent(tmp_path: Path) -> None:
    # case W29
    config = loaded(
        tmp_path,
        f"""\
        defaults: {{scaling: {{max: 1}}, start_timeout_max: 1h, silent_after: 2m}}
        models:
          a: {{{CMD}}}
          b: {{{CMD}, start_timeout: 1m, start_timeout_max: 90s, silent_after: 0}}
        """,
    )
    a, b = config.models["a"], config.models["b"]
    assert (a.start_timeout_ms, a.start_timeout_ms_max) == (300_000, 3_600_000)
    assert (b.start_timeout_ms, b.start_timeout_ms_max) == (60_000, 90_000)
    assert (a.silent_after_ms, b.silent_after_ms) == (120_000, 0)


def test_a_start_timeout_gives_its_own_bound(tmp_path: Path) -> None:
    text = f"models: {{a: {{{CMD}, scaling: {{max: 1}}, start_timeout: 1m}}}}"
    assert loaded(tmp_path, text).models["a"].start_timeout_ms_max == 240_000


def test_bounds_that_make_no_sense(tmp_path: Path) -> None:
    start = len(f"  a: {{{CMD}, ") + 1
    assert complaints(
        tmp_path,
        f"""\
        defaults: {{scaling: {{max: 1}}, start_timeout_max: 1m}}
        models:
          a: {{{CMD}, start_timeout: 2m}}
          b: {{{CMD}, start_timeout: 1h, start_timeout_max: 1s}}
          c: {{{CMD}}}
          d: {{{CMD}, start_timeout: 1m}}
        """,
    ) == [
        "1:50: `start_timeout` is over `start_timeout_max`",
        f"3:{start + 15}: `start_timeout` is over `start_timeout_max`",
        f"4:{start + 38}: `start_timeout` is over `start_timeout_max`",
    ]
    text = f"models: {{a: {{{CMD}, scaling: {{max: 1}}, silent_after: 100ms}}}}"
    (complaint,) = complaints(tmp_path, text)
    assert "`silent_after` is 100ms; what is silent for less than 1s may be busy" in complaint


def test_unknown_keys_come_with_a_suggestion(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        modles: {}
        scaling: {max: 1}
        on_exit: keep
        defaults: {idle_timeout: 1m}
        devices: {cpu: {memry: 1GiB, memory: 1GiB}}
        models:
          a: {url: http://far:1, listen: x, ttl: 5, min: 1, sleep: 1}
          b: {url: http://far:1, wombat: 1}
          c: {model: x, scaling: {maxx: 1}}
          d: {url: http://far:1, scaling: {max: 1}}
        """,
    ) == [
        "1:1: unknown key `modles`; did you mean `models`?",
        "2:1: unknown key `scaling`; it belongs under `models: NAME`",
        "3:1: `on_exit` is not built yet; remove it",
        "4:12: unknown key `idle_timeout`; it belongs under `scaling`",
        "5:17: unknown key `memry`; did you mean `memory`?",
        "7:26: unknown key `listen`; it belongs at the top of the file",
        "7:37: unknown key `ttl`; here it is `scaling: {idle_timeout: …}`",
        "7:45: unknown key `min`; it belongs under `scaling`",
        "7:53: `sleep` is not built yet; remove it",
        complaints_of_wombat(),
        "9:27: unknown key `maxx`; did you mean `max`?",
        "10:26: `scaling` does nothing with `url`; it goes with `cmd` or `model`",
    ]


def complaints_of_wombat() -> str:
    from rota.config.schema import ModelKeys

    known = ", ".join(f"`{name}`" for name in sorted(ModelKeys.model_fields))
    return f"8:26: unknown key `wombat`; there is {known}"


def test_wrong_values(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        f"""\
        listen: 8080
        body_bytes_max: 64
        devices:
          g0: {{memory: 0MiB}}
          g1: 8GiB
          g2: {{}}
        models:
          a: {{{CMD}, concurrency: many, queue_max: -1, cwd: , scaling: 1, patience: 10}}
          b: [1]
          c: {{cmd: [a, b]}}
          d: {{{CMD}, aliases: [[x]], env: [x], start_timeout: 0}}
          e: {{{CMD}, memory: {{}}, scaling: {{min: 2, max: 1}}}}
        """,
    ) == [
        "1:9: `8080` is not HOST:PORT, like 127.0.0.1:8080 or [::1]:8080",
        "2:17: `body_bytes_max` `64` has no unit; say 64GiB or 64MiB",
        "4:16: `memory` is less than 1MiB",
        "5:7: `g1` must be a mapping",
        "6:3: `memory` is missing",
        *(f"8:{column}: {text}" for column, text in wrong_values_of_a()),
        "9:6: `b` must be a mapping",
        "10:12: `cmd` is a list; text is wanted",
        *(f"11:{column}: {text}" for column, text in wrong_values_of_d()),
        *(f"12:{column}: {text}" for column, text in wrong_values_of_e()),
    ]


def wrong_values_of_a() -> list[tuple[int, str]]:
    start = len(f"  a: {{{CMD}, ") + 1
    return [
        (start + 13, "`concurrency` `many` is not a whole number"),
        (start + 30, "`queue_max` is -1; it goes from 0 to 1000000"),
        (start + 38, "`cwd` has no value; text is wanted"),
        (start + 50, "`scaling` must be a mapping"),
        (start + 63, "`patience` `10` has no unit; say 10s or 10m"),
    ]


def wrong_values_of_d() -> list[tuple[int, str]]:
    start = len(f"  d: {{{CMD}, ") + 1
    return [
        (start + 10, "item 1 of `aliases` is a list; text is wanted"),
        (start + 21, "`env` is a list; a mapping is wanted"),
        (start + 41, "`start_timeout` is 0; nothing can happen in no time"),
    ]


def wrong_values_of_e() -> list[tuple[int, str]]:
    start = len(f"  e: {{{CMD}, ") + 1
    return [
        (start, "`memory` is there twice; the first is in line 12"),
        (start + 27, "`min` 2 is over `max` 1"),
    ]


def test_names_and_aliases_are_unique(tmp_path: Path) -> None:
    rule = "names have 1 to 256 printable characters and no spaces around them"
    assert complaints(
        tmp_path,
        """\
        models:
          a: {url: http://far:1, aliases: [x, b, a, x]}
          b: {url: http://far:1, aliases: [x, " y"]}
          "c\\n": {url: http://far:1}
        """,
    ) == [
        "2:39: alias `b` is the name of `b` in line 3",
        "2:42: alias `a` is the name of `a` in line 2",
        "2:45: alias `x` is already an alias of `a` in line 2",
        "3:36: alias `x` is already an alias of `a` in line 2",
        f"3:39: ` y` cannot be an alias; {rule}",
        f"4:3: `c\\n` cannot be a name; {rule}",
    ]


def test_every_address_of_this_machine_is_its_own() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.9", 9))  # sends nothing; says which address would
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    assert is_own(f"http://{address}:8080", "0.0.0.0", 8080)
    assert not is_own(f"http://{address}:8080", "127.0.0.1", 8080)


@pytest.mark.parametrize(
    ("listen", "host", "is_refused"),
    [
        ("127.0.0.1:8080", "localhost", True),
        ("127.0.0.1:8080", "127.0.0.1", True),
        ("127.0.0.1:8080", "127.0.0.2", True),
        ("127.0.0.1:8080", "[::1]", True),
        ("127.0.0.1:8080", "0.0.0.0", True),
        ("0.0.0.0:8080", "localhost", True),
        ("[::]:8080", "LOCALHOST", True),
        ("0.0.0.0:8080", "127.0.0.3", True),
        ("0.0.0.0:8080", "203.0.113.9", False),  # TEST-NET-3: nobody's
        ("0.0.0.0:8080", "some.host", False),
        ("10.0.0.5:8080", "10.0.0.5", True),
        ("127.0.0.1:8080", "10.0.0.5", False),
        ("127.0.0.1:8081", "localhost", False),
        ("127.0.0.1:0", "localhost", False),
    ],
)
def test_own_address_as_an_upstream(
    tmp_path: Path, listen: str, host: str, is_refused: bool
) -> None:
    text = f"listen: '{listen}'\nmodels: {{a: {{url: 'http://{host}:8080/v1'}}}}"
    if not is_refused:
        loaded(tmp_path, text, allow_open=True)
        return
    assert complaints(tmp_path, text, allow_open=True) == [
        f"2:19: `http://{host}:8080/v1` is where rota itself listens: it would ask itself for ever"
    ]


def test_own_address_where_it_is_overridden(tmp_path: Path) -> None:
    text = "models: {a: {url: 'http://localhost:9000'}}"
    loaded(tmp_path, text)
    assert "itself" in complaints(tmp_path, text, listen="127.0.0.1:9000")[0]


@pytest.mark.parametrize(
    "url",
    [
        "far:8000",
        "ftp://far",
        "http://",
        "http://far:99999",
        "http://far:0",
        "http://[::1",
        "http://a b",
        "http://me:secret@far",
        "http://far/?x=1",
        "http://fär",
    ],
)
def test_urls_that_cannot_be_asked(tmp_path: Path, url: str) -> None:
    assert complaints(tmp_path, f"models: {{a: {{url: '{url}'}}}}")[0].startswith("1:19: ")


def test_open_to_other_machines(tmp_path: Path) -> None:
    text = "listen: 0.0.0.0:8080\nmodels: {a: {url: http://far:1}}"
    said = "0.0.0.0 can be reached from other machines, and there are no keys"
    assert complaints(tmp_path, text) == [f"1:9: {said}; listen on 127.0.0.1 or say --open"]
    assert (
        loaded(tmp_path, text, allow_open=True)
        .warnings[0]
        .endswith(f"{said}: `rota serve` needs --open")
    )
    assert complaints(tmp_path, "models: {a: {url: http://far:1}}", listen="0.0.0.0:1") == [
        f"0:0: {said}; listen on 127.0.0.1 or say --open"
    ]


@pytest.mark.parametrize("text", ["8080", ":8080", "host", "host:", "h:99999", "::1:80", "a b:1"])
def test_no_address(tmp_path: Path, text: str) -> None:
    assert (
        "is not HOST:PORT"
        in complaints(tmp_path, "models: {a: {url: http://far:1}}", listen=text)[0]
    )


def test_commands_that_no_shell_will_run(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        macros: {there: ok}
        models:
          a: {cmd: "true"}
          b: {cmd: "true ${PROT}"}
          c: {cmd: "A=1 true ${PORT}"}
          d: {cmd: "true 'x ${PORT}"}
          e: {cmd: "''"}
          f: {cmd: "true", port: 8080}
          g: {cmd: "true", port: 9000}
          h: {cmd: "true", port: 9000}
          i: {cmd: "true", port: 9001, scaling: {max: 2}}
          j: {cmd: "true", port: 9002, ready: health}
          k: {cmd: "true", env: {P: "${PORT}", "": x}}
          l: {cmd: "true ${PORT}", context: 5, server: x}
          m: {cmd: "true ${PORT} ${PID}", cmd_stop: "kill ${PIT}"}
          n: {cmd: "true ${PORT}", cmd_stop: "''"}
          o: {url: http://far:1, cmd_stop: "true", upstream_model: " x"}
          p: {model: x, server: x, cmd_stop: "true", upstream_model: x}
        """,
    ) == [
        "3:12: the command is told no port; write `${PORT}` in it, or state `port:`",
        "4:12: nothing is called `${PROT}`; there is ${PORT}, ${MODEL}, ${there}",
        "4:12: the command is told no port; write `${PORT}` in it, or state `port:`",
        "5:12: no shell runs the command; put `A=1` under `env:`",
        "6:12: the command cannot be split: no closing quotation",
        "7:12: the command is empty",
        "8:26: port 8080 is where rota itself listens",
        "10:26: port 9000 is also that of `g`; leave it out and use ${PORT}",
        "11:26: several replicas cannot share port 9001; leave it out and use ${PORT}",
        "12:39: `ready` is a path like /health, or none",
        "13:44: `` cannot be a variable's name",
        "14:28: `context` does nothing with `cmd`; it goes with `model`",
        "14:40: `server` does nothing with `cmd`; it goes with `model`",
        "15:12: nothing is called `${PID}`; there is ${PORT}, ${MODEL}, ${there}",
        "15:45: nothing is called `${PIT}`; there is ${PID}, ${PORT}, ${MODEL}, ${there}",
        "16:38: the command is empty",
        "17:26: `cmd_stop` does nothing with `url`; it goes with `cmd`",
        f"17:60: ` x` cannot be a name; {NAME_RULE}",
        "18:28: `cmd_stop` does nothing with `model`; it goes with `cmd`",
        "18:46: `upstream_model` does nothing with `model`; it goes with `cmd` or `url`",
    ]


def test_one_more_is_not_for_a_model_where_nobody_waits(tmp_path: Path) -> None:
    said = warnings(
        tmp_path,
        f"""\
        models:
          a: {{{CMD}, scaling: {{max: 3}}, when_full: reject}}
          b: {{{CMD}, scaling: {{min: 2}}, when_full: reject}}
        """,
    )
    assert said == [
        (
            "2: with `when_full: reject` no more than 1 of `max` 3 replicas come up: one more is "
            "for those who wait, and nobody does"
        )
    ]


def test_what_may_be_wrong_with_a_command(tmp_path: Path) -> None:
    assert warnings(
        tmp_path,
        """\
        models:
          a: {cmd: "no-such-program ${PORT}", memory: 1GiB, scaling: {max: 1}}
          b: {cmd: "./none ${PORT}", cwd: nowhere, memory: 1GiB, scaling: {max: 1}}
          c: {cmd: "true ${PORT} && true", memory: 1GiB, scaling: {max: 1}}
          d: {cmd: "true ${PORT}", scaling: {max: 2}}
          e: {cmd: "true ${PORT}", cmd_stop: "dokcer stop x > log", scaling: {max: 1}, memory: 1GiB}
        """,
    ) == [
        "2: there is no command no-such-program",
        f"3: there is no command {tmp_path}/nowhere/none",
        f"3: there is no folder {tmp_path}/nowhere",
        "4: no shell runs the command: `&&` is handed to it as a word; use sh -c '…'",
        "5: `d` states no `memory`, so it takes its device whole and shares it with nothing",
        "6: no shell runs the command: `>` is handed to it as a word; use sh -c '…'",
        "6: there is no command dokcer",
    ]


def test_gguf_files(tmp_path: Path) -> None:
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(b"GGUF")
        file.truncate(100_000_000)
    (tmp_path / "other.gguf").write_bytes(b"zip")
    os.mkfifo(tmp_path / "pipe.gguf")  # reading one without a writer would hang
    text = """\
        models:
          a: {model: m.gguf, scaling: {max: 1}}
          b: {model: m.gguf, scaling: {max: 1}, memory: 1GiB}
          c: {model: other.gguf, scaling: {max: 1}}
          d: {model: none.gguf, scaling: {max: 1}, memory: 1GiB}
          e: {model: m.gguf, context: 8192, parallel: 1, scaling: {max: 1}}
          f: {model: pipe.gguf, scaling: {max: 1}, memory: 1GiB}
        """
    config = loaded(tmp_path, text)
    memory = {name: entry.model.memory_mib for name, entry in config.models.items()}
    assert memory == {"a": 530, "b": 1024, "c": None, "d": 1024, "e": 368, "f": 1024}
    assert warnings(tmp_path, text) == [
        f"4: {tmp_path}/other.gguf is not a GGUF file; it cannot be started",
        f"5: there is no file {tmp_path}/none.gguf; it cannot be started",
        f"7: there is no file {tmp_path}/pipe.gguf; it cannot be started",
    ]


def test_a_split_gguf_counts_all_its_parts(tmp_path: Path) -> None:
    from rota.config.footprint import FIXED_MIB, estimate_mib

    for part in (1, 2):
        with (tmp_path / f"m-0000{part}-of-00002.gguf").open("wb") as file:
            file.write(b"GGUF")
            file.truncate(100 * 1024 * 1024)
    assert estimate_mib(tmp_path / "m-00001-of-00002.gguf", tokens=0) == 230 + FIXED_MIB
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert estimate_mib(tmp_path / "m-00001-of-00002.gguf", tokens=0) is None


def test_llama_cpp(tmp_path: Path) -> None:
    assert complaints(
        tmp_path,
        """\
        models:
          a: {model: m.gguf, args: [--x]}
          b: {model: m.gguf, engine: vllm}
          c: {cmd: "true ${PORT}", engine: llama.cpp}
          d: {model: m.gguf, server: sh, args: ["${no}"], embedding: yes}
          e: {model: m.gguf, port: 1}
        """,
    ) == [
        "2:28: `args` go to a `llama-server`; state `server:` too",
        "3:30: engine `vllm` is not known; it is `llama.cpp`, or leave it out and use `cmd`",
        "4:36: engine `llama.cpp` needs `model`, not `cmd`",
        "5:41: nothing is called `${no}`; there is none",
        "5:62: `embedding` `yes` is neither true nor false",
        "6:22: `port` does nothing with `model`; it goes with `cmd`",
    ]


def test_where_models_go(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    text = f"""\
        devices: {{cpu: {{memory: 8GiB}}, g0: {{memory: 8GiB}}, g1: {{memory: 8GiB}}}}
        models:
          embedded: {{model: m.gguf}}
          own: {{model: m.gguf, server: sh}}
          command: {{{CMD}}}
          told: {{{CMD}, devices: cpu}}
        """
    config = loaded(tmp_path, text)
    devices = {name: entry.model.devices for name, entry in config.models.items()}
    assert devices == {
        "embedded": frozenset({"cpu"}),
        "own": frozenset({"g0", "g1"}),
        "command": frozenset({"g0", "g1"}),
        "told": frozenset({"cpu"}),
    }
    assert complaints(tmp_path, text.replace("devices: cpu", "devices: [cpu, g3]"))[0].endswith(
        "there is no device `g3`; there is `cpu`, `g0`, `g1`"
    )


def test_models_that_always_run_must_fit_together(tmp_path: Path) -> None:
    always = f"{{{CMD.replace('1GiB', '6GiB')}, scaling: {{min: 1}}}}"
    text = f"""\
        devices: {{g0: {{memory: 8GiB}}, g1: {{memory: 4GiB}}}}
        models:
          a: {always}
          b: {always}
        """
    have, need = "g0 8 GiB, g1 4 GiB", "`a` (6 GiB), `b` (6 GiB)"
    assert complaints(tmp_path, text) == [
        f"4:3: models with `min` of 1 or more never fit the devices ({have}) together: {need}"
    ]
    assert loaded(tmp_path, text.replace("4GiB", "6GiB")).warnings == ()


def test_models_that_can_never_be_loaded(tmp_path: Path) -> None:
    on_demand = "scaling: {max: 1}"
    assert warnings(
        tmp_path,
        f"""\
        devices: {{g0: {{memory: 8GiB}}, g1: {{memory: 4GiB}}}}
        models:
          a: {{{CMD.replace("1GiB", "6GiB")}, scaling: {{min: 1}}}}
          b: {{{CMD.replace("1GiB", "6GiB")}, {on_demand}}}
          c: {{{CMD.replace("1GiB", "9GiB")}, {on_demand}}}
          d: {{{CMD.replace("1GiB", "3GiB")}, device_count: 2, {on_demand}}}
          e: {{{CMD.replace("1GiB", "4GiB")}, {on_demand}}}
        """,
    ) == [
        "4: `b` can never be loaded beside the models that always run: it needs 6 GiB",
        "5: `c` can never be loaded: it needs 9 GiB",
        "6: `d` can never be loaded beside the models that always run: it needs 3 GiB on each of 2",
    ]


def test_no_models(tmp_path: Path) -> None:
    assert complaints(tmp_path, "listen: 127.0.0.1:1") == [
        "0:0: `models` is missing; nothing is served"
    ]
    assert complaints(tmp_path, "models: {}") == ["1:1: `models` is empty; nothing is served"]
    assert complaints(tmp_path, "models:") == ["1:8: `models` has no value; a mapping is wanted"]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("{}", JobsConfig()),
        ("openai-videos", JobsConfig()),
        ("/v1/renders", JobsConfig(submit="/v1/renders", poll="/v1/renders/{id}")),
        ("{submit: /run}", JobsConfig(submit="/run", poll="/run/{id}")),
        (
            "{submit: /r, poll: '/r/{id}/logs', id: a.b, status: c, done: Ready, ttl: 1m, keep: 0}",
            JobsConfig("/r", "/r/{id}/logs", "a.b", "c", frozenset({"ready"}), 60_000, 0),
        ),
    ],
)
def test_jobs(tmp_path: Path, stated: str, expected: JobsConfig) -> None:
    config = loaded(tmp_path, f"models: {{a: {{url: 'http://far:1', jobs: {stated}}}}}")
    assert config.models["a"].jobs == expected
    assert config.warnings == ()


def test_a_model_has_no_jobs_and_keeps_its_web_sockets_unless_it_says_so(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """\
        defaults: {websocket_idle: 1m}
        models:
          a: {url: 'http://far:1'}
          b: {url: 'http://far:2', websocket_idle: 0}
        """,
    )
    assert config.models["a"].jobs is None
    assert [entry.websocket_idle_ms for entry in config.models.values()] == [60_000, 0]


def test_mistakes_with_jobs(tmp_path: Path) -> None:
    def said(jobs: str) -> str:
        [text] = complaints(tmp_path, f"models: {{a: {{url: 'http://far:1', jobs: {jobs}}}}}")
        return text.partition(": ")[2]

    assert said("openai") == ("`jobs` is `openai`; a mapping, `openai-videos` or a path is wanted")
    assert "a path like /v1/videos is wanted" in said("{submit: run}")
    assert "a path like /v1/videos is wanted" in said("{submit: '/a?b'}")
    assert "which rota answers itself" in said("{submit: /rota/v1/x}")
    for path in ("/v1", "/rota", "/upstream", "/v1/"):  # asked after below, GET /v1/models is a job
        for jobs in (f"{{submit: {path}}}", f"{{submit: /run, poll: '{path}/{{id}}'}}", path):
            assert "paths of its own" in said(jobs), jobs
    for name in ("jobs", "scaling"):  # a model may be called so
        [text] = complaints(tmp_path, f"models: {{{name}: {{url: 'http://far:1', slot: 3}}}}")
        assert "`aliases`" in text
    assert said("{polls: /run}") == "unknown key `polls`; did you mean `poll`?"
    for poll in ("/runs", "/{id}", "/runs/{id}x", "/runs/x{id}", "/runs/{id}/{id}"):
        assert "is wanted" in said(f"{{poll: '{poll}'}}"), poll
    assert "a name like `id` or `data.id` is wanted" in said("{id: a..b}")


def test_a_job_that_would_outlast_every_lease(tmp_path: Path) -> None:
    text = "lease_ttl_max: 30m\nmodels: {a: {url: 'http://far:1', jobs: {ttl: 1h}}}"
    assert warnings(tmp_path, text) == ["2: no lease lasts longer than `lease_ttl_max`, 30m"]


def test_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "models: {a: {url: http://far:1}}"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert loaded(tmp_path, text).state_dir == Path("/xdg/rota")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert loaded(tmp_path, text).state_dir == Path("/home/me/.local/state/rota")
    assert loaded(tmp_path, text + "\nstate: ~/s").state_dir == Path("/home/me/s")
    assert loaded(tmp_path, text, state_dir=Path("/told")).state_dir == Path("/told")


def test_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    text = "models: {a: {url: http://far:1}}"
    assert complaints(tmp_path, text) == [
        "0:0: there is no home folder; say where to keep state (`state:` or --state)"
    ]
    assert loaded(tmp_path, text, state_dir=tmp_path).state_dir == tmp_path


HASH = "ab" * 32


def test_keys_and_what_they_decide(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        f"""\
        listen: 0.0.0.0:8080
        keys:
          alice: {{sha256: {HASH.upper()}}}
          bob:
            sha256: {"cd" * 32}
            priority: -7
            hold: 1s
            hold_finished: 0
            patience: 1m
            patience_min: 10s
        models: {{a: {{url: http://far:1}}}}
        """,
    )
    assert config.keys == {
        "alice": KeyConfig("alice", bytes.fromhex(HASH)),
        "bob": KeyConfig("bob", bytes.fromhex("cd" * 32), -7, 1_000, 0, 60_000, 10_000),
    }
    assert config.warnings == ()  # with keys, other machines may be let in
    assert HASH not in repr(config)
    assert str(config.keys["alice"].digest) not in repr(config)


def test_keys_that_cannot_be_meant(tmp_path: Path) -> None:
    rule = "names have 1 to 256 printable characters and no spaces around them"
    assert complaints(
        tmp_path,
        f"""\
        listen: 0.0.0.0:8080
        keys:
          alice: {{sha256: {HASH}}}
          bob: {{sha256: {HASH}}}
          carol: {{sha256: sk-secret}}
          dave: {{priority: 1}}
          erin: sk-secret
          " f": {{sha256: {"cd" * 32}, priority: 1001, patient: x}}
        models: {{a: {{url: http://far:1}}}}
        """,
    ) == [
        "4:17: `bob` has the same key as `alice`",
        "5:19: `sha256` is no SHA-256 in hex; `rota keys hash` makes one of a key",
        "6:3: `sha256` is missing",
        "7:9: `erin` must be a mapping",
        f"8:3: ` f` cannot be a key's name; {rule}",
        "8:94: `priority` is 1001; it goes from -1000 to 1000",
        "8:100: unknown key `patient`; did you mean `patience`?",
    ]


def test_no_keys_are_no_keys(tmp_path: Path) -> None:
    assert complaints(tmp_path, "keys: {}\nmodels: {a: {url: http://far:1}}") == [
        "1:1: `keys` is empty; add one, or remove it"
    ]
    assert complaints(tmp_path, "keys: [a]\nmodels: {a: {url: http://far:1}}") == [
        "1:7: `keys` is a list; a mapping is wanted"
    ]
