"""What is accepted as leniently as there, and what macros, ports and the environment come to.
How: small files, and lines of what is made of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rota.config.llama_swap import convert
from tests.config.helpers import complaints, loaded
from tests.config.llama_swap.helpers import converted, told


def model(fields: str = "") -> str:
    return f'models: {{m: {{cmd: "x ${{PORT}}"{fields}}}}}\n'


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing\n", "models:", "models: {}", "models: {m: }"),
        *("unknown: {a: '${b}'}\nmodels: {}", f"healthCheckTimeout: 1\n{model()}"),
        *(model(", concurrencyLimit: -1"), f"captureBuffer: -1\n{model()}"),
        *(model(", env: [NO_VALUE]"), f"logLevel: bogus\n{model()}"),
        *(f"groups: {{g: {{}}}}\n{model()}", f"groups: {{(default): {{members: [m]}}}}\n{model()}"),
        *(model(", aliases: [m]"), model(", unlisted: 'yes'"), model(", ttl: 1.5")),
        *(f"startPort: 70000\n{model()}", model(", name: 5"), "models: {123: {cmd: 'x ${PORT}'}}"),
        *("models: {m: {proxy: 'http://h:1'}}", f"performance: {{every: 1h30m}}\n{model()}"),
        *("%YAML 1.2\n---\nmodels: {}", f"macros:\n{model()}", f"peers: {{p: }}\n{model()}"),
    ],
)
def test_accepted(text: str) -> None:
    converted(text)


def test_the_last_declared_macro_comes_first() -> None:
    text = """\
        macros: {a: 1, b: "${a}2", c: "${b}3${MODEL_ID}"}
        models:
          m: {cmd: "x ${PORT} ${c}", macros: {a: 9, d: "${c}!"}}
          n: {cmd: "x ${PORT} ${d}", macros: {d: "${c}!"}}
        """
    page = converted(text).text
    assert "cmd: x ${PORT} 923m\n" in page  # its own `a` in the place of the other
    assert "cmd: x ${PORT} 123n!\n" in page


def test_a_text_that_is_one_macro_has_its_type() -> None:
    text = """\
        macros: {t: 90, u: "yes", p: 9001}
        models: {m: {cmd: "x", ttl: "${t}", unlisted: "${u}", proxy: "http://127.0.0.1:${p}"}}
        """
    page = converted(text).text
    assert "    scaling: {idle_timeout: 1m30s}" in page
    assert "    port: 9001\n" in page


def test_comments_of_a_command_are_dropped_before_macros_are_filled_in() -> None:
    text = """\
        macros: {a: "b\\nc"}
        models:
          m:
            cmd: |
              # ${a} ${nothing}
              x ${PORT}
        """
    assert "    cmd: x ${PORT}\n" in converted(text).text


def test_ports_are_given_by_the_bytes_of_names() -> None:
    text = """\
        startPort: 9000
        models:
          é: {cmd: "x ${PORT}", aliases: ["at-${PORT}"]}
          b: {cmd: "x ${PORT}", aliases: ["at-${PORT}"]}
          Z: {cmd: "x ${PORT}", proxy: "http://127.0.0.1:7000"}
          a: {cmd: "x", proxy: "http://127.0.0.1:7001"}
        """
    page = converted(text).text
    assert "    aliases: [at-9001]\n" in page.partition("  b:\n")[2]
    assert '"é":\n    cmd: x ${PORT}\n    aliases: [at-9002]\n' in page
    assert "  Z:\n    cmd: x 9000\n    port: 7000\n" in page  # told one, asked at another
    assert "  a:\n    cmd: x\n    port: 7001\n" in page


def test_names_are_text_however_they_look() -> None:
    text = "models: {123: {cmd: 'x ${PORT}'}, 1.10: {cmd: 'x ${PORT}'}, on: {cmd: 'x ${PORT}'}}"
    page = converted(text).text
    for name in ('"123"', '"1.10"', '"on"'):
        assert f"\n  {name}:\n" in page


# --- the environment ---


def test_the_environment_is_filled_in_before_it_is_yaml() -> None:
    text = """\
        # ${env.IN_A_COMMENT} is not asked for
        apiKeys: ["${env.KEY}"]
        models:
          m:
            cmd: |
              # but ${env.IN_A_COMMAND} is
              x ${PORT} "${env.QUOTED}"
            env: ["HF_TOKEN=${env.HF_TOKEN}", "OTHER=${env.HF_TOKEN}"]
        """
    environ = {"KEY": "sk-key", "IN_A_COMMAND": "", "QUOTED": 'a"b\\c', "HF_TOKEN": "hf"}
    made = converted(text, environ)
    assert made.environment == frozenset(environ)
    assert hashlib.sha256(b"sk-key").hexdigest() in made.text
    assert "sk-key" not in made.text
    assert '    cmd: x ${PORT} "a\\"b\\\\c"\n' in made.text
    assert "      OTHER: hf\n" in made.text
    assert "      HF_TOKEN:" not in made.text  # inherited
    assert "Filled in from the environment of the import: HF_TOKEN, IN_A_COMMAND" in made.text


# --- names that are nobody's, and other leniency ---


def test_a_name_to_load_at_the_start_that_is_nobodys_is_told() -> None:
    # case W42
    text = f"""{model(", aliases: [mm]")}groups: {{gang: {{members: [m]}}}}
hooks: {{on_startup: {{preload: [mm, gang, mistral, ""]}}}}
"""
    assert "    preload: once" in converted(text).text
    assert told(text) == [
        "3:36: `preload`: `gang` is a group; nothing is loaded; there is `m`",
        "3:42: `preload`: `mistral` is no model; nothing is loaded; there is `m`",
    ]


@pytest.mark.parametrize(
    ("fields", "timeout"),
    [
        ("", "0"),
        (", ttl: 0", "0"),
        (", ttl: -1", "0"),
        (", ttl: 300", "5m"),
        (", ttl: 1e3", "16m40s"),
    ],
)
def test_never_stays_never(fields: str, timeout: str) -> None:
    # case K3
    assert f"idle_timeout: {timeout}}}" in converted(model(fields)).text


def test_a_global_ttl_is_for_those_that_state_none() -> None:
    text = "globalTTL: 60\nmodels: {m: {cmd: 'x ${PORT}', ttl: 0}, n: {cmd: 'x ${PORT}'}}"
    page = converted(text).text
    assert page.count("idle_timeout") == 2
    assert "scaling: {max: 1, idle_timeout: 1m}" in page
    assert "    scaling: {idle_timeout: 0}   # ttl" in page


@pytest.mark.parametrize(
    ("fields", "ready"),
    [
        ("", None),
        (", checkEndpoint: none", "none"),
        (", checkEndpoint: ''", "/"),
        (", checkEndpoint: v1/models", "/v1/models"),
        (", checkEndpoint: 'http://h:1/up?x=1'", "/up?x=1"),
        (", checkEndpoint: /h, proxy: 'http://localhost:${PORT}/base/'", "/base/h"),
    ],
)
def test_ready(fields: str, ready: str | None) -> None:
    page = converted(model(fields)).text
    assert (f"    ready: {ready}\n" in page.replace('"', "")) == (ready is not None)


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("https://127.0.0.1:${PORT}", "it was asked by HTTPS; rota asks its engines by HTTP"),
        ("http://gpu-box:8000", "it was asked at gpu-box; rota asks its engines at 127.0.0.1"),
        ("http://127.0.0.1:8000/v", "it was asked below /v; rota adds nothing to a request's path"),
    ],
)
def test_an_address_that_cannot_be_kept_is_told(proxy: str, said: str) -> None:
    (line,) = told(model(f", proxy: '{proxy}'"))
    assert line.endswith(said)


def test_a_model_may_have_rotas_own_port() -> None:
    text = (
        "models: {m: {cmd: x, proxy: 'http://localhost:8080'}, n: {cmd: x, proxy: 'http://h:8081'}}"
    )
    assert "\nlisten: 127.0.0.1:8082   # 8080 is a model's\n" in converted(text).text


def test_models_that_swap_may_share_a_port(tmp_path: Path) -> None:
    text = "".join(f"  {name}: {{cmd: 'true', proxy: 'http://h:9999'}}\n" for name in "abc")
    assert len(loaded(tmp_path, f"models:\n{text}").models) == 3
    together = f"models:\n{text}groups: {{g: {{swap: false, members: [a, b]}}}}"
    (line,) = complaints(tmp_path, together)
    assert line == "3:20: port 9999 is also that of `a`; leave it out and use ${PORT}"


def test_what_a_command_means_by_a_dollar_stays() -> None:
    page = converted("models: {m: {cmd: \"sh -c 'x ${PORT} ${HOME:-y} $z'\"}}").text
    assert "    cmd: sh -c 'x ${PORT} ${dollar}{HOME:-y} $z'\n" in page
    assert 'macros: {dollar: "$"}\n' in page


# --- several files ---


def merged(*texts: str) -> str:
    files = {Path(f"{n}.yaml"): text.encode() for n, text in enumerate(texts)}
    return convert(files, {}).text


def test_several_files_are_one() -> None:
    page = merged(
        "globalTTL: 60\nhooks: {on_startup: {preload: [m]}}\n" + model(),
        "globalTTL: 60\nmodels: {n: {cmd: 'y ${PORT}'}}\nhooks: {on_startup: {preload: [n]}}",
        "",
        "models: \nlogLevel: info\n",
    )
    assert page.startswith("# Made of 0.yaml, 1.yaml, 2.yaml, 3.yaml by")
    assert page.count("preload: once") == 2


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (model(), model(), "1.yaml:1:10: `m` of `models` is already in 0.yaml:1:10"),
        ("globalTTL: 1", "globalTTL: 2", "1.yaml:1:1: `globalTTL` is something else in 0.yaml:1:1"),
        ("hooks: {}", "hooks: []", "1.yaml:1:1: `hooks` is of another kind than in 0.yaml:1:1"),
    ],
)
def test_files_that_disagree(first: str, second: str, said: str) -> None:
    with pytest.raises(Exception, match=said.replace(".", r"\.")) as caught:
        merged(first, second)
    assert str(caught.value) == said
