"""Commands in words as llama-swap splits them, and in lines that rota splits into the same words.
How: a table of commands; then texts at random, laid out and split by rota's own rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.config.entry import split_command
from rota.config.llama_swap.command import lay_out, split

LINES = [
    ("a b c", ["a", "b", "c"]),
    ("  a \t b  ", ["a", "b"]),
    ("a\nb\n\nc", ["a", "b", "c"]),
    ("a \\\nb", ["a", "b"]),
    ("a\\\nb", ["a", "b"]),
    ("a \\  \nb", ["a", "b"]),
    ("# all of it\na", ["a"]),
    ("a\n  # indented\nb", ["a", "b"]),
    ("a # b", ["a", "#", "b"]),
    ("a#b", ["a#b"]),
    ("a --x \\\n# gone\n--y", ["a", "--x", "--y"]),
    ("a 'b c'", ["a", "b c"]),
    ('a "b c"', ["a", "b c"]),
    ("a 'b\n# gone even here\nc'", ["a", "b\nc"]),
    ("a ''", ["a", ""]),
    ("a \"'b'\"", ["a", "'b'"]),
    ("a '\"b\"'", ["a", '"b"']),
    ('a "b \\"c\\""', ["a", 'b "c"']),
    ('a "b\\c"', ["a", "b\\c"]),
    ("a 'b\\c'", ["a", "b\\c"]),
    ("a b\\ c", ["a", "b c"]),
    ("a C:\\x\\y", ["a", "C:xy"]),
    ('a {"b":"c"}', ["a", "{b:c}"]),
    ('a \'{"b":"c"}\'', ["a", '{"b":"c"}']),
    ("a $HOME ~ | b && c > d", ["a", "$HOME", "~", "|", "b", "&&", "c", ">", "d"]),
    ("a x'y z'w", ["a", "xy zw"]),
    ('a --x="y z"', ["a", "--x=y z"]),
    ("a 'never closed", ["a", "never closed"]),
    ('a "never closed', ["a", "never closed"]),
    ("a b\r\nc", ["a", "b\r", "c"]),
    ("a *.gguf ?", ["a", "*.gguf", "?"]),
    ("", []),
    ("# nothing", []),
]


@pytest.mark.parametrize(("text", "words"), LINES)
def test_words(text: str, words: list[str]) -> None:
    assert split(text) == words
    assert split_command("\n".join(lay_out(text))) == words


def test_lines_stay_as_they_were() -> None:
    text = "llama-server --port 1\n  -m '/m/a b.gguf' \\\n  # a comment\n  -c 4096\n"
    assert lay_out(text) == ["llama-server --port 1", "-m '/m/a b.gguf'", "-c 4096"]


def test_a_long_line_is_broken_before_an_option() -> None:
    lines = lay_out("run " + " ".join(f"--option-{n} value-{n}" for n in range(9)))
    assert len(lines) > 1
    assert all(line.startswith("--") for line in lines[1:])
    assert max(map(len, lines)) <= 110


@given(st.text(alphabet="ab -'\"\\\n\r\t#$;", max_size=40))
def test_any_text_comes_out_as_the_same_words(text: str) -> None:
    assert split_command("\n".join(lay_out(text))) == split(text)
