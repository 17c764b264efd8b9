"""The reference in docs/configuration.md, made from the schema.

`python -m rota.config.reference > docs/configuration.md` writes it anew; a test says when that
was forgotten. A page kept by hand was refused: it is wrong after the second change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rota.config import schema

_INTRO = """\
# The configuration file

Made from the schema by `python -m rota.config.reference`; edit there.

One YAML file, checked by `rota check FILE`, which shows every mistake with its line. The
smallest useful one:

```yaml
models:
  qwen: {model: /models/qwen.gguf, scaling: {max: 1}}
```

[examples/rota.yaml](../examples/rota.yaml) shows every kind of entry.

- **Names are text.** `123:`, `on:` and `off:` are names like any other; no value is taken for
  a number or a truth that the key does not ask for.
- **Unknown keys are mistakes**, and so are keys that do nothing with the kind of model at hand.
- **Durations** have units: `500ms`, `10s`, `5m`, `1h30m`, `2d`, or a bare `0`.
- **Memory** has units: `512MiB`, `8GiB` (1024), `24GB` (1000). `24G` is refused: it could be
  either. Footprints are rounded up to whole MiB, budgets down.
- **Paths** that are relative start at the file's folder; `~` is the home folder.
- **Placeholders**: `${PORT}` and `${MODEL}` are filled in at each start, `${name}` from `macros`
  when the file is read. Macros do not contain each other. No shell and no environment is asked.
  Within `{…}` a text with a placeholder needs quotes.
"""

_AFTER_SCALING = """\
| stated | means |
| --- | --- |
| nothing, neither here nor in `defaults` | off; `rota check` says so |
| `{max: 0}` | off, on purpose |
| `{max: n}` | on demand: `min: 0` |
| `{min: n}` | always: `max: n` |
| `{min: n, max: m}` | n always, up to m; n over m is a mistake |
| `{idle_timeout: t}` | `min` and `max` as in `defaults`; with none there, off, with a warning |

A `max` above `min` is accepted and not acted on yet: a model on demand runs one replica, one that
always runs `min` of them. A warning says so.
"""

_AFTER_JOBS = """\
[jobs.md](jobs.md) tells what becomes of a job, and of web sockets.
"""

_AFTER_MODELS = """\
Which keys go with which kind is said in front of each (`cmd`, `model`, `url`); the others go with
every kind, save that `url` has neither scaling nor pinning nor devices nor start and stop.

Without `memory`, a model run by llama.cpp is estimated from the size of its file, 15 % more for
what goes with the weights and an allowance for the KV cache of `context` × `parallel` tokens.
Any other model takes its devices whole, and a warning says so.

Where both `cpu` and GPUs are stated and a model names no devices, the embedded llama.cpp goes
to `cpu` and everything else to the GPUs.
"""

_AFTER_DEVICES = """\
Without `devices`, what the machine has is found when rota starts. Models that always run and can
never stand on the stated devices together are a mistake; one on demand that can never be loaded
is a warning.
"""

_AFTER_GROUPS = """\
[coexistence.md](coexistence.md) tells who leaves for whom. `groups` and `matrix` exclude each
other; with neither, and for a model that is in no group, memory alone decides.
"""

_AFTER_KEYS = """\
[keys.md](keys.md) tells how clients send theirs and what a key decides.
"""

_SECTIONS: tuple[tuple[str, type[schema.Keys], str], ...] = (
    ("The top of the file", schema.FileKeys, ""),
    ("`devices: NAME`", schema.DeviceKeys, _AFTER_DEVICES),
    ("`models: NAME`", schema.ModelKeys, _AFTER_MODELS),
    ("`keys: NAME`", schema.ClientKeys, _AFTER_KEYS),
    ("`groups: NAME`", schema.GroupKeys, _AFTER_GROUPS),
    ("`matrix`", schema.MatrixKeys, ""),
    ("`jobs`", schema.JobsKeys, _AFTER_JOBS),
    ("`scaling`", schema.ScalingKeys, _AFTER_SCALING),
    ("`defaults`", schema.SharedKeys, ""),
)


def render() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *(_section(*section) for section in _SECTIONS)])


def _section(title: str, keys: type[schema.Keys], after: str) -> str:
    text = f"## {title}\n\n{_table(keys)}\n"
    return f"{text}\n{after}" if after else text


def _table(keys: type[schema.Keys]) -> str:
    return "\n".join(
        ["| key | value | default | what |", "| --- | --- | --- | --- |", *_rows(keys)]
    )


def _rows(keys: type[schema.Keys]) -> Iterator[str]:
    own = [name for name in keys.model_fields if name in keys.__annotations__]
    for name in [*own, *(name for name in keys.model_fields if name not in own)]:
        field = keys.model_fields[name]
        extra = field.json_schema_extra
        assert isinstance(extra, dict), name
        yield f"| `{name}` | {extra['kind']} | {extra['shown']} | {field.description} |"


if __name__ == "__main__":
    sys.stdout.write(render())
