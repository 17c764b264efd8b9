"""What llama-swap refuses is refused, with the line it stands in.
How: a text per mistake, its one complaint compared word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.llama_swap.helpers import refused

M = 'models: {m: {cmd: "x ${PORT}"}, n: {cmd: "y ${PORT}", aliases: [nn]}}\n'


UNTOLD = (
    "`m` is asked at `${PORT}`, which its command is not told; write `${PORT}` in `cmd`, or a "
    "fixed port in `proxy`"
)


def model(fields: str) -> str:
    return f'models: {{m: {{cmd: "x  ${{PORT}}", {fields}}}}}\n'


YAML = [
    ("- a", "1:1: is not a mapping; it needs `models:`"),
    ("models: {m: {cmd: a}, m: {cmd: b}}", "1:23: `m` is there twice; the first is in line 1"),
    ("a: !!int x", "1:4: `x` is no !!int"),
    ("a: &a [*a]", "1:4: an alias that contains itself"),
    ("a: {<<: 1}", "1:5: `<<` takes a mapping, or a list of mappings"),
    ("? [a]\n: b", "1:3: a key must be text"),
    ("a: b: c", "1:5: not YAML: a second `:` in one line; quote the text if it has one"),
]

TYPES = [
    ("models: []", "1:1: `models` is a list; a mapping is wanted"),
    ("models: {m: [a]}", "1:10: `m` is a list; a mapping is wanted"),
    ("models: {m: {cmd: [a, b], proxy: http://h:1}}", "1:14: `cmd` is a list; text is wanted"),
    (model('ttl: "60"'), "1:33: `ttl` is the text `60`; a whole number is wanted"),
    (model("ttl: 5m"), "1:33: `ttl` is the text `5m`; a whole number is wanted"),
    (model("ttl: true"), "1:33: `ttl` is `true`; a whole number is wanted"),
    (model("ttl: .inf"), "1:33: `ttl` is `+Inf`; that is no number here"),
    (model("ttl: -2"), "1:33: `ttl` is under -1"),
    (model("unloadTimeout: -1"), "1:33: `unloadTimeout` is under 0"),
    (model("concurrencyLimit: many"), "is the text `many`; a whole number is wanted"),
    (model("unlisted: 1"), "1:33: `unlisted` is `1`; true or false is wanted"),
    (model("aliases: a"), "1:33: `aliases` is no list"),
    (model("aliases: [{a: b}]"), "1:43: item 1 of `aliases` is a mapping; text is wanted"),
    (model("env: {A: b}"), "1:33: `env` is no list"),
    (model("metadata: x"), "1:33: `metadata` is the text `x`; a mapping is wanted"),
    (model("filters: {setParams: [a]}"), "1:43: `setParams` is a list; a mapping is wanted"),
    (model("timeouts: {connect: 5s}"), "is the text `5s`; a whole number is wanted"),
    (model("capabilities: {in: [smell]}"), "1:53: `smell` is none of text, audio, image"),
    (model("capabilities: {context: -1}"), "1:48: `context` is under 0"),
    (model("estVramGB: big"), "1:33: `estVramGB` is the text `big`; a number is wanted"),
]

TOP = [
    (f"{M}logToStdout: x", "2:1: `logToStdout` is none of proxy, upstream, both, none"),
    (f"{M}startPort: 0", "2:1: `startPort` is under 1"),
    (f"{M}globalTTL: -1", "2:1: `globalTTL` is under 0"),
    (f"{M}unloadTimeout: -1", "2:1: `unloadTimeout` is under 0"),
    (f"{M}performance: {{every: 1s}}", "2:15: `every` is under 5s"),
    (f"{M}performance: {{every: soon}}", "2:15: `every` is not a duration like 5s"),
    (f'{M}store: {{path: ""}}', "2:9: `path` is empty"),
    (f"{M}store: {{path: /}}", "2:9: `path` is a directory"),
    (f"{M}store: {{path: /nowhere/at/all}}", "2:9: `path` cannot be written"),
    (f'{M}apiKeys: [""]', "2:11: item 1 of `apiKeys` is empty"),
    (f'{M}apiKeys: [k, "a b"]', "2:14: item 2 of `apiKeys` has a space in it"),
    (f"{M}apiKeys: sk-secret", "2:1: `apiKeys` is no list"),
    (f"{M}upstream: {{ignorePaths: ['(']}}", "is not a regular expression: "),
    (f"{M}routing: {{scheduler: {{use: lifo}}}}", "names no scheduler; there is `fifo`"),
    (
        f"{M}routing: {{scheduler: {{settings: {{fifo: {{priority: {{x: 1}}}}}}}}}}",
        "there is no model `x`; there is `m`, `n`",
    ),
]

MACROS = [
    ("macros: [a]", "1:1: `macros` must be a mapping"),
    ("macros: {a: ~}", "1:10: the macro `a` is neither text, a number nor a truth"),
    ("macros: {a: [1]}", "1:10: the macro `a` is neither text, a number nor a truth"),
    ("macros: {a: 2024-01-01}", "1:10: the macro `a` is neither text, a number nor a truth"),
    ('macros: {a: "x ${a}"}', "1:10: the macro `a` contains itself"),
    ("macros: {PORT: 1}", "the macro `PORT` has a name that is taken: it is filled in by itself"),
    ("macros: {PID: 1}", "the macro `PID` has a name that is taken: it is filled in by itself"),
    ("macros: {a.b: 1}", "has a name of other signs than letters, digits, `_` and `-`"),
    (f"macros: {{{'a' * 64}: 1}}", "has a name of more than 63 characters"),
    (model("macros: {MODEL_ID: x}"), "has a name that is taken: it is filled in by itself"),
    ('models: {m: {cmd: "${nope} ${PORT}"}}', "1:14: nothing is called `${nope}`"),
    (
        'macros: {a: "${b}", b: x}\nmodels: {m: {cmd: "${a} ${PORT}"}}',
        "2:14: nothing is called `${b}`",  # only what was declared before
    ),
    (model("name: '${PID}'"), "1:33: nothing is called `${PID}`"),
    (model('metadata: {a: ["${z}"]}'), "1:48: nothing is called `${z}`"),
    (f'{M}hooks: {{on_startup: {{preload: ["${{z}}"]}}}}', "nothing is called `${z}`"),
    (model('filters: {setParamsByID: {"${z}": {}}}'), "nothing is called `${z}`"),
    (
        model('filters: {setParamsByID: {"${MODEL_ID}": {}, m: {}}}'),
        "two keys of `setParamsByID` become `m`",
    ),
    (
        "models: {m: {cmd: x}}",
        f"1:14: {UNTOLD}",
    ),
    (
        'models: {m: {cmd: x, proxy: "http://h:${PORT}"}}',
        f"1:22: {UNTOLD}",
    ),
    # case L5
    ("models:\n  m:\n    name: x", "3:5: `m` has no `cmd`: nothing to run"),
    (model("name: '${env.NONE}'"), "1:40: the environment variable `NONE` is not set"),
    (model("name: '${env.LINES}'"), "the environment variable `LINES` is of several lines"),
    (
        "macros: {a: xxxxxxxxxx, "
        + ", ".join(f"b{n}: '{'${%s}' % (f'b{n - 1}' if n else 'a') * 10}'" for n in range(6))
        + '}\nmodels: {m: {cmd: "${b5} ${PORT}"}}',
        "its macros make more than 1 MiB of it",
    ),
]

NAMES = [
    (
        "models: {m: {cmd: 'x ${PORT}', aliases: [a, a]}}",
        "1:45: the alias `a` is already one of `m`",
    ),
    (
        "models: {m: {cmd: 'x ${PORT}', aliases: [a]}, n: {cmd: 'x ${PORT}', aliases: [a]}}",
        "the alias `a` is already one of `m`",
    ),
    (f"{M}groups: {{g: {{members: [m, m]}}}}", "2:27: `m` is in this group twice"),
    (f"{M}groups: {{g: {{members: [m]}}, h: {{members: [m]}}}}", "2:43: `m` is in `g` too"),
    (f"{M}groups: {{g: {{members: [mm]}}}}", "there is no model `mm`; did you mean `m`?"),
    (f"{M}groups: {{g: {{swap: maybe}}}}", "is the text `maybe`; true or false is wanted"),
    (
        f"{M}groups: {{g: {{members: [m]}}}}\nmatrix: {{sets: {{s: m}}}}",
        "3:1: `groups` and `matrix` are both there; keep one of them",
    ),
    (
        f"{M}groups: {{g: {{members: [m]}}}}\nrouting: {{router: {{use: group}}}}",
        "2:1: `groups` or `matrix` is here and `routing.router` is too; keep one of them",
    ),
    (f"{M}routing: {{router: {{use: dice}}}}", "2:20: `use` is neither group nor matrix"),
    (f"{M}routing: {{router: {{use: matrix}}}}", "is matrix, and there is none under `settings`"),
    (f"{M}matrix: {{vars: {{a: m}}}}", "2:1: the matrix has no `sets`"),
    (
        "models: {m: {cmd: 'x ${PORT}', filters: {setParamsByID: {n: {}}}}, n: {cmd: 'x ${PORT}'}}",
        "`n` is a model of its own",
    ),
    (
        model("filters: {setParamsByID: {a: {}}}}, n: {cmd: 'x ${PORT}', aliases: [a]"),
        "1:101: the alias `a` is already one of `m`",
    ),
    (f"{M}peers: {{p: {{models: [a]}}}}", "2:9: the peer `p` has no `proxy`"),
    (f"{M}peers: {{p: {{proxy: http://h}}}}", "2:9: the peer `p` has no `models`"),
    (
        "models: {p/a: {cmd: 'x ${PORT}'}}\npeers: {p: {proxy: http://h, models: [a]}}",
        "2:39: `p/a` is also the name of a model here",
    ),
    (
        "peers: {p: {proxy: http://h, models: [a/b]}, p/a: {proxy: http://h, models: [b]}}",
        "1:78: `p/a/b` is a model of the peer `p` too",
    ),
]

CHECKED_ONLY = [
    (
        f"{M}selectors: {{m: {{strategy: pin, targets: [n]}}}}",
        "2:13: the selector `m` has the name of a model",
    ),
    (f"{M}selectors: {{s: {{targets: [n]}}}}", "`strategy` is none of pin, warm, spillover"),
    (f"{M}selectors: {{s: {{strategy: pin}}}}", "2:13: the selector `s` has no `targets`"),
    (f"{M}selectors: {{s: {{strategy: pin, targets: [x]}}}}", "there is no model `x`"),
    (
        f"{M}selectors: {{s: {{strategy: pin, targets: [t]}}, t: {{strategy: pin, targets: [m]}}}}",
        "`t` is a selector itself",
    ),
    (
        f"{M}selectors: {{s: {{strategy: spillover, targets: [m, n]}}}}",
        "`targets` are not in one group with `swap: false`",
    ),
    (
        f"{M}selectors: {{s: {{strategy: spillover, targets: [n, nn]}}}}",
        "`targets` names a model twice",
    ),
    (f"{M}profiles: {{p: {{description: x}}}}", "2:12: the profile `p` has no `pins`"),
    (f"{M}profiles: {{p: {{pins: {{a: x}}}}}}", "2:23: there is no model `x`"),
    (f"{M}profiles: {{p: [m, n]}}", "2:12: `p` is a list; a mapping is wanted"),
    (f'{M}listeners: {{":1": {{groups: [g]}}}}', "there is no group `g`"),
    (f'{M}listeners: {{":1": {{}}}}', "2:13: the listener `:1` has no `groups`"),
    (
        f"{M}apiKeys: [k]\napiKeyModels: {{k: [m]}}",
        "3:1: `apiKeyModels` leaves no key that opens all models",
    ),
]


@pytest.mark.parametrize(("text", "said"), [*YAML, *TYPES, *TOP, *MACROS, *NAMES, *CHECKED_ONLY])
def test_refused(text: str, said: str) -> None:
    (line,) = refused(text, {"LINES": "a\nb"})
    assert line.endswith(said) or said in line, line


def test_every_mistake_is_told_at_once() -> None:
    text = f"{M}startPort: 0\nglobalTTL: x\nlogToStdout: y\n"
    assert [line[:2] for line in refused(text)] == ["2:", "3:", "4:"]


def test_no_key_is_repeated() -> None:
    keys = f"{M}apiKeys: [sk-secret, sk-secret x, {{sk-secret: 1}}]\n"
    peers = "peers: {p: {apiKey: [sk-secret]}}"
    assert "sk-secret" not in "\n".join(refused(keys + peers))


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    assert refused(f"{M}store: {{path: {tmp_path}}}") == ["2:9: `path` is a directory"]
