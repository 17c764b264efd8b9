"""Who must leave for whom, by groups and by a matrix of allowed sets.

Worked cases, and beside them the peer's rules written down a second time from its documentation:
for groups over every setting and every company, for sets by writing all of them out.
"""

from __future__ import annotations

import re
from itertools import chain, combinations, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core import matrix
from rota.core.coexistence import FREE, Group, Groups, Matrix, Option
from rota.core.matrix import ExpressionError


def subsets(names: str) -> list[frozenset[str]]:
    return [frozenset(some) for n in range(len(names) + 1) for some in combinations(names, n)]


def leaving(rules: Groups | Matrix, target: str, present: str) -> list[str]:
    """Who leaves in each option, the best first, as words of one-letter models."""
    options = rules.options(target, frozenset(present))
    return ["".join(sorted(option.leaving)) for option in options]


# ── groups ───────────────────────────────────────────────────────────────────────────────────


def test_without_rules_nobody_is_asked_to_leave() -> None:
    assert FREE.is_free
    assert FREE.options("a", frozenset("bc"))[0].leaving == frozenset()
    assert FREE.may_displace("a", "b")
    assert Groups(()).is_free
    assert Groups((Group("g", frozenset("ab"), swap=False, exclusive=False),)).is_free
    assert Groups((Group("g", frozenset("a"), exclusive=False),)).is_free
    assert not Groups((Group("g", frozenset("ab"), exclusive=False),)).is_free


CHAT_AND_TOOLS = Groups(
    (
        Group("chat", frozenset("ab")),
        Group("tools", frozenset("cd"), swap=False, exclusive=False),
        Group("kept", frozenset("ef"), exclusive=False, persistent=True),
    )
)


@pytest.mark.parametrize(
    ("target", "present", "leaves", "rule"),
    [
        ("a", "", "", "group `chat` makes nobody leave"),
        ("a", "b", "b", "group `chat` swaps"),
        ("a", "cd", "cd", "group `chat` is exclusive"),
        ("a", "bcx", "bcx", "group `chat` swaps and is exclusive"),
        ("a", "e", "", "group `chat` makes nobody leave"),
        ("c", "ab", "", "group `tools` makes nobody leave"),
        ("c", "d", "", "group `tools` makes nobody leave"),
        ("e", "f", "f", "group `kept` swaps"),
        ("e", "ac", "", "group `kept` makes nobody leave"),
        ("x", "ace", "", "x is in no group"),
    ],
)
def test_groups_swap_exclude_and_persist(target: str, present: str, leaves: str, rule: str) -> None:
    expected = Option(frozenset(leaves), 0, rule)
    assert CHAT_AND_TOOLS.options(target, frozenset(present)) == (expected,)


def test_an_exclusive_group_is_asked_only_when_it_comes() -> None:
    """The peer's gotcha: who is not exclusive comes in beside who is."""
    assert leaving(CHAT_AND_TOOLS, "c", "a") == [""]
    assert leaving(CHAT_AND_TOOLS, "a", "c") == ["c"]


def test_a_persistent_model_leaves_for_its_own_group_alone() -> None:
    assert not CHAT_AND_TOOLS.may_displace("a", "e")
    assert not CHAT_AND_TOOLS.may_displace("x", "e")
    assert CHAT_AND_TOOLS.may_displace("f", "e")
    assert CHAT_AND_TOOLS.may_displace("e", "a")
    assert CHAT_AND_TOOLS.may_displace("e", "x")


def test_a_model_in_no_group_leaves_for_an_exclusive_one() -> None:
    assert leaving(CHAT_AND_TOOLS, "a", "x") == ["x"]


Settings = tuple[bool, bool, bool]
"""swap, exclusive, persistent."""


def peer_evicts(home: dict[str, str], has: dict[str, Settings], target: str, other: str) -> bool:
    """The peer's documented rule: members of one group swap where it says swap; loading a member
    of an exclusive group unloads every other group, but not one that is persistent."""
    swap, exclusive, _ = has[home[target]]
    if home[target] == home[other]:
        return swap
    _, _, other_is_persistent = has[home[other]]
    return exclusive and not other_is_persistent


def test_the_peer_decides_alike_in_every_company() -> None:
    """Two groups of two in every setting, and the group that holds the rest; all companies."""
    home = dict(zip("abcde", "ggjjk", strict=True))
    settings = [(s, e, p) for s, e, p in product((False, True), repeat=3)]
    for one, two in product(settings, repeat=2):
        has = {"g": one, "j": two, "k": (True, True, False)}
        rules = Groups(
            tuple(
                Group(name, frozenset(m for m in home if home[m] == name), *setting)
                for name, setting in has.items()
            )
        )
        for target in home:
            for present in subsets("".join(sorted(home.keys() - {target}))):
                expected = {o for o in present if peer_evicts(home, has, target, o)}
                (option,) = rules.options(target, present)
                assert option.leaving == expected, (has, target, present)
                assert all(rules.may_displace(target, victim) for victim in expected)


# ── a matrix ─────────────────────────────────────────────────────────────────────────────────


def written_out(text: str, **others: str) -> set[str]:
    """The sets that an expression stands for: those of which each keeps what no other does."""
    sets = {"it": text, **others}
    expressions = {name: matrix.parse(text) for name, text in sets.items()}
    weights = dict.fromkeys("abcdv", 1)
    families = matrix.families(expressions, matrix.in_order(expressions), {}, weights)
    return {"".join(sorted(way)) for way in families["it"]}


def test_and_binds_tighter_than_or() -> None:
    assert written_out("(a | b) & (c | d)") == {"ac", "ad", "bc", "bd"}
    assert written_out("a | b & c") == {"a", "bc"}
    assert written_out("+x & v", x="a | b") == {"av", "bv"}
    assert written_out(" ( ( a ) ) ") == {"a"}
    assert written_out("a&a|a") == {"a"}


def test_the_cheapest_leave() -> None:
    rules = Matrix((("x", "a & c"), ("y", "a & b")), costs={"b": 10, "c": 1})
    assert rules.options("a", frozenset("bc")) == (
        Option(frozenset("c"), 1, "set `y` of the matrix"),
        Option(frozenset("b"), 10, "set `x` of the matrix"),
    )


def test_of_two_that_cost_the_same_the_first_in_the_file_is_taken() -> None:
    assert leaving(Matrix((("x", "a & c"), ("y", "a & b"))), "a", "bc") == ["b", "c"]
    assert leaving(Matrix((("y", "a & b"), ("x", "a & c"))), "a", "bc") == ["c", "b"]
    assert leaving(Matrix((("z", "+w | a & b"), ("w", "a & c"))), "a", "bc") == ["b", "c"]


def test_part_of_an_allowed_set_is_allowed() -> None:
    rules = Matrix((("all", "a & b & c & d"), ("none", "a")))
    for present in subsets("bcd"):
        assert leaving(rules, "a", "".join(present)) == [""]


def test_a_model_in_no_set_runs_alone() -> None:
    rules = Matrix((("x", "a & b"),), costs={"a": 5})
    alone = Option(frozenset("ab"), 6, "z is in no set of the matrix and runs alone")
    assert rules.options("z", frozenset("ab")) == (alone,)
    assert leaving(rules, "a", "z") == ["z"], "and leaves for whoever comes"


def test_short_names_stand_for_models() -> None:
    rules = Matrix((("x", "s & big:70b"),), vars={"s": "small"}, costs={"small": 3})
    (option,) = rules.options("big:70b", frozenset({"small", "other"}))
    assert option.leaving == {"other"}
    (option,) = rules.options("other", frozenset({"small"}))
    assert option.cost == 3


def test_ten_billion_sets_are_asked_as_quickly_as_ten() -> None:
    def one_of(row: int) -> str:
        return "(" + " | ".join(f"m{row}{i}" for i in range(10)) + ")"

    rules = Matrix((("all", " & ".join(map(one_of, range(10)))),))
    company = frozenset(f"m{row}3" for row in range(10))
    (option,) = rules.options("m77", company)
    assert option.leaving == {"m73"}


def test_a_company_that_no_set_allows_is_still_answered() -> None:
    """Dozens of models that came under another file: many ways, of which the dearest is kept."""
    rows = [f"(a{i} | b{i})" for i in range(12)]
    rules = Matrix((("all", " & ".join([*rows, "t"])),), costs={f"a{i}": 2 for i in range(12)})
    company = frozenset(f"{x}{i}" for x in "ab" for i in range(12))
    options = rules.options("t", company)
    assert options[0].leaving == {f"b{i}" for i in range(12)}
    assert len(options) <= matrix.KEPT_MAX


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("", 1, "is empty"),
        ("   ", 1, "is empty"),
        ("a &", 4, "a name or `(` is wanted, not the end"),
        ("a | & b", 5, "a name or `(` is wanted, not `&`"),
        ("()", 2, "a name or `(` is wanted, not `)`"),
        ("a b", 3, "`&` or `|` is wanted before `b`"),
        ("a , b", 3, "`&` or `|` is wanted before `,`"),
        ("a)", 2, "`&` or `|` is wanted before `)`"),
        ("b & (a", 5, "`(` without its `)`"),
        ("a & + b", 5, "the name of a set is wanted after `+`"),
        ("a+", 2, "the name of a set is wanted after `+`"),
        ("(" * 9_999, 101, "has more than 100 `(` within each other"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_column(
    text: str, column: int, said: str
) -> None:
    with pytest.raises(ExpressionError, match=re.escape(said)) as caught:
        matrix.parse(text)
    assert caught.value.column == column


def test_sets_that_refer_to_none_or_in_a_circle_are_refused() -> None:
    with pytest.raises(ExpressionError, match="no set `y`"):
        Matrix((("x", "a & +y"),))
    with pytest.raises(ExpressionError, match="refers to itself: x → x"):
        Matrix((("x", "a | +x"),))
    with pytest.raises(ExpressionError, match="refers to itself: "):
        Matrix((("x", "+y"), ("y", "+z"), ("z", "+x")))


def test_a_long_chain_of_sets_is_no_burden() -> None:
    chained = [(f"s{i}", f"+s{i + 1} & +s{i + 1}") for i in range(2_000)]
    rules = Matrix((*chained, ("s2000", "a & b")))
    assert leaving(rules, "a", "b") == [""]


def test_rules_are_values() -> None:
    """A reload compares them, and a journal writes them down."""
    one, two = (Matrix((("x", "a & b"),), costs={"a": 2}) for _ in range(2))
    assert one.options("a", frozenset("c")) == two.options("a", frozenset("c"))
    assert one == two != Matrix((("x", "a & b"),))
    for rules in (one, CHAT_AND_TOOLS):
        plain = msgspec.json.decode(msgspec.json.encode(rules))
        assert msgspec.convert(plain, type(rules)) == rules


Tree = str | tuple[str, "Tree", "Tree"]
trees = st.recursive(
    st.sampled_from("abcde"), lambda t: st.tuples(st.sampled_from("&|"), t, t), max_leaves=12
)


def as_text(tree: Tree) -> str:
    return tree if isinstance(tree, str) else f"({as_text(tree[1])} {tree[0]} {as_text(tree[2])})"


def expand(tree: Tree) -> list[frozenset[str]]:
    """Every set, written out."""
    if isinstance(tree, str):
        return [frozenset(tree)]
    mark, left, right = tree
    if mark == "|":
        return expand(left) + expand(right)
    return [one | two for one in expand(left) for two in expand(right)]


@given(
    some=st.lists(trees, min_size=1, max_size=3),
    present=st.sampled_from(subsets("bcdef")),
    costs=st.dictionaries(st.sampled_from("bcdef"), st.integers(1, 9)),
)
def test_the_options_are_those_of_all_sets_written_out(
    some: list[Tree], present: frozenset[str], costs: dict[str, int]
) -> None:
    rules = Matrix(tuple((f"s{i}", as_text(tree)) for i, tree in enumerate(some)), costs=costs)
    holding = [s for s in chain.from_iterable(map(expand, some)) if "a" in s]
    expected = {present - allowed for allowed in holding} or {present}
    least = {out for out in expected if not any(other < out for other in expected)}
    options = rules.options("a", present)
    assert [o.leaving for o in options if o.leaving not in least] == []
    assert {option.leaving for option in options} == least
    assert all(o.cost == sum(costs.get(m, 1) for m in o.leaving) for o in options)
    assert list(options) == sorted(options, key=lambda option: option.cost)
