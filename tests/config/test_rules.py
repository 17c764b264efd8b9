"""What `groups` and `matrix` mean, and each mistake in them with its line and remedy.

How: short files, and the values, problems or warnings that come out, word for word.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from rota.config.entry import NAME_RULE
from rota.core.coexistence import FREE, Group, Groups, Matrix
from tests.config.helpers import complaints, loaded, warnings

MODELS = """\
defaults: {scaling: {max: 1}}
models:
  qwen: {cmd: "true ${PORT}", memory: 1GiB, aliases: [gpt]}
  coder: {cmd: "true ${PORT}", memory: 1GiB}
  voice: {cmd: "true ${PORT}", memory: 1GiB}
  far: {url: "http://10.0.0.7:8000"}
"""


def with_rules(rules: str) -> str:
    """The models in lines 1 to 6, the rules from line 7 on."""
    return MODELS + textwrap.dedent(rules)


def always(*names: str) -> str:
    """The models, some of which always run; their lines are those of MODELS."""
    text = MODELS
    for name in names:
        text = text.replace(f"  {name}: {{", f"  {name}: {{scaling: {{min: 1}}, ")
    return text


def test_without_either_memory_alone_decides(tmp_path: Path) -> None:
    assert loaded(tmp_path, MODELS).coexistence == FREE
    assert loaded(tmp_path, with_rules("groups: {}")).coexistence == FREE


def test_groups(tmp_path: Path) -> None:
    rules = """\
        groups:
          chat: {members: [qwen, coder]}
          (default): {members: voice, swap: false, exclusive: false, persistent: true}
        """
    config = loaded(tmp_path, with_rules(rules))
    assert config.coexistence == Groups(
        (
            Group("chat", frozenset({"qwen", "coder"})),
            Group("(default)", frozenset({"voice"}), False, False, True),
        )
    )
    assert config.warnings == ()


def test_a_matrix(tmp_path: Path) -> None:
    rules = """\
        matrix:
          vars: {q: qwen, v: voice}
          evict_costs: {v: 50, coder: 2}
          sets:
            talk: (q | coder) & v
            alone: coder
        """
    config = loaded(tmp_path, with_rules(rules))
    assert config.coexistence == Matrix(
        sets=(("talk", "(q | coder) & v"), ("alone", "coder")),
        vars={"q": "qwen", "v": "voice"},
        costs={"voice": 50, "coder": 2},
    )
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("groups: {g: {}}", "7:10: `members` is missing"),
        ("groups: {g: {members: []}}", "7:23: `members` is empty; a group is of models"),
        (
            "groups: {g: {members: [qwn]}}",
            # case W42
            "7:24: there is no model `qwn`; did you mean `qwen`?",
        ),
        ("groups: {g: {members: [gpt]}}", "7:24: `gpt` is an alias; the model is `qwen`"),
        (
            "groups: {g: {members: [far]}}",
            "7:24: `far` is run by someone else (`url`); no rule here makes it leave",
        ),
        (
            "groups:\n  g: {members: [qwen]}\n  h: {members: [coder, qwen]}",
            "9:24: `qwen` is in group `g` in line 8; a model is in one at most",
        ),
        ("groups: {g: {members: [qwen, qwen]}}", "7:30: `qwen` is in this group twice"),
        (
            "groups: {' ': {members: [qwen]}}",
            f"7:10: ` ` cannot be a group's name; {NAME_RULE}",
        ),
        (
            "groups: {g: {members: [qwen], exlusive: true}}",
            "7:31: unknown key `exlusive`; did you mean `exclusive`?",
        ),
        (
            "groups: {g: {members: [qwen]}}\nmatrix: {sets: {x: qwen}}",
            "8:1: `groups` and `matrix` are both there; one of them says who may stay",
        ),
        ("persistent: true", "7:1: unknown key `persistent`; it belongs under `groups: NAME`"),
    ],
)
def test_mistakes_in_groups(tmp_path: Path, rules: str, said: str) -> None:
    assert complaints(tmp_path, with_rules(rules)) == [said]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("{}", "7:1: `sets` is missing"),
        ("{sets: {}}", "7:16: `sets` is empty; it says what may stand together"),
        ("{sets: {x: }}", "7:19: `x` has no value; text is wanted"),
        (
            "{sets: {x: ''}}",
            "7:20: at character 1 of the set: is empty; `a & b` lets a and b stand together",
        ),
        (
            "{sets: {x: qwen & (coder}}",
            "7:20: at character 8 of the set: `(` without its `)`",
        ),
        (
            "{sets: {x: qwen & codr}}",
            "7:20: at character 8 of the set: there is no model `codr`; did you mean `coder`?",
        ),
        (
            "{sets: {x: coder | gpt}}",
            "7:20: at character 9 of the set: `gpt` is an alias; the model is `qwen`",
        ),
        (
            "{sets: {llms: qwen, x: +llm & voice}}",
            "7:32: at character 1 of the set: there is no set `llm`; did you mean `llms`?",
        ),
        ("{sets: {x: +y, y: qwen | +x}}", "7:20: the set refers to itself: x → y → x"),
        (
            "{sets: {x: qwen}, vars: {q: gpt}}",
            "7:37: `gpt` is an alias; the model is `qwen`",
        ),
        (
            "{sets: {x: qwen}, vars: {a b: qwen}}",
            "7:34: `a b` cannot be a short name: no blanks, and no `& | ( ) +`",
        ),
        (
            "{sets: {x: qwen}, evict_costs: {qwn: 2}}",
            "7:41: there is no model `qwn`; did you mean `qwen`?",
        ),
        (
            "{sets: {x: qwen}, evict_costs: {qwen: 0}}",
            "7:47: `qwen` is 0; it goes from 1 to 1000000000",
        ),
        (
            "{sets: {x: q}, vars: {q: qwen}, evict_costs: {q: 2, qwen: 3}}",
            "7:61: the cost of `qwen` is there twice, by its name and by a short one",
        ),
        ("{set: {x: qwen}, sets: {x: qwen}}", "7:10: unknown key `set`; did you mean `sets`?"),
    ],
)
def test_mistakes_in_a_matrix(tmp_path: Path, rules: str, said: str) -> None:
    assert complaints(tmp_path, with_rules(f"matrix: {rules}")) == [said]


def test_each_set_is_looked_at(tmp_path: Path) -> None:
    rules = """\
        matrix:
          sets:
            one: qwen &
            two: coder | vioce | gpt
        """
    assert complaints(tmp_path, with_rules(rules)) == [
        "9:10: at character 7 of the set: a name or `(` is wanted, not the end",
        "10:10: at character 17 of the set: `gpt` is an alias; the model is `qwen`",
        "10:10: at character 9 of the set: there is no model `vioce`; did you mean `voice`?",
    ]


def test_a_member_with_a_mistake_of_its_own_is_a_member_all_the_same(tmp_path: Path) -> None:
    text = MODELS.replace("  qwen: {", "  qwen: {cmd: 3, ").replace('"true ${PORT}"', "[]", 1)
    said = complaints(tmp_path, text + "groups: {g: {members: [qwen]}}")
    assert not [line for line in said if "there is no model" in line]


TOGETHER = "models with `min` of 1 or more may never run together on one node: "


@pytest.mark.parametrize(
    ("names", "rules", "said"),
    [
        (
            ("qwen", "coder"),
            "groups: {chat: {members: [qwen, coder]}}",
            f"4:3: {TOGETHER}`coder`, `qwen` (group `chat` swaps)",
        ),
        (
            ("qwen", "coder"),
            "groups: {a: {members: [qwen]}, b: {members: [coder]}}",
            f"4:3: {TOGETHER}`coder`, `qwen` (group `b` is exclusive)",
        ),
        (
            ("qwen", "coder", "voice"),
            "matrix: {sets: {x: qwen & coder, y: coder & voice, z: voice & qwen}}",
            f"5:3: {TOGETHER}`coder`, `qwen`, `voice` (set `x` of the matrix)",
        ),
    ],
)
def test_models_that_always_run_must_be_allowed_to(
    tmp_path: Path, names: tuple[str, ...], rules: str, said: str
) -> None:
    assert complaints(tmp_path, always(*names) + rules) == [said]


@pytest.mark.parametrize(
    "rules",
    [
        "groups: {chat: {members: [qwen, coder], swap: false}}",
        "groups: {a: {members: [qwen]}, b: {members: [coder], exclusive: false}}",
        "groups: {a: {members: [qwen]}, b: {members: [coder], persistent: true}}",
        "matrix: {sets: {x: qwen & (coder | voice)}}",
    ],
)
def test_one_order_in_which_they_may_come_is_enough(tmp_path: Path, rules: str) -> None:
    loaded(tmp_path, always("qwen", "coder") + rules)


def test_one_that_can_never_be_loaded_is_warned_of(tmp_path: Path) -> None:
    text = always("qwen") + "groups: {chat: {members: [qwen, coder]}}"
    assert warnings(tmp_path, text) == [
        "4: `coder` can never be loaded beside `qwen`, which always runs (group `chat` swaps)"
    ]


def test_one_that_the_matrix_forgot_is_warned_of(tmp_path: Path) -> None:
    text = with_rules("matrix: {sets: {x: qwen & coder}}")
    assert warnings(tmp_path, text) == ["5: `voice` is in no set of the matrix, so it runs alone"]
