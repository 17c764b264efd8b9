"""Scalars as yaml.v3 reads them and as Go prints them into a command.
How: each value is a macro; the command that it ends in is looked up in what comes of the file."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.config.llama_swap.scalars import Moment, resolve, show, truth
from tests.config.llama_swap.helpers import converted


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        *(("yes", "yes"), ("on", "on"), ("n", "n"), ("True", "true"), ("true", "true")),
        *(("FALSE", "false"), ("tRuE", "tRuE"), ("'true'", "true"), ("hello", "hello")),
        *(("1e6", "1e+06"), ("1e3", "1000"), ("1000000.0", "1e+06"), ("100000.0", "100000")),
        *(("123456789.123", "1.23456789123e+08"), ("0.10", "0.1"), ("1.0", "1"), (".5", "0.5")),
        *(("1.5e-7", "1.5e-07"), ("0.0001", "0.0001"), ("0.00001", "1e-05"), ("-0.5", "-0.5")),
        *(("1e21", "1e+21"), ("1e100", "1e+100"), ("123456.789", "123456.789"), ("-0.0", "-0")),
        *(("010", "8"), ("0o17", "15"), ("0x1F", "31"), ("0b11", "3"), ("1_000", "1000")),
        *(("-0b11", "-3"), ("+5", "5"), ("089", "89"), ("0x", "0x"), ("1__0", "10")),
        *(("18446744073709551615", "18446744073709551615"), ("12:30:45", "12:30:45")),
        *(("18446744073709551616", "1.8446744073709552e+19"), ("1e999", "1e999")),
        *(("1.2.3", "1.2.3"), ("...", "..."), ("1,000", "1,000"), ('"1e6"', "1e6")),
        *(("!!str 1e6", "1e6"), ("!!int '0x10'", "16"), ("!!float 1", "1"), ("!own 010", "8")),
    ],
)
def test_a_macro_in_a_command(written: str, printed: str) -> None:
    text = f"macros:\n  v: {written}\nmodels:\n  m: {{cmd: 'run ${{PORT}} [${{v}}]'}}\n"
    assert f'run ${{PORT}} [{printed}]"' in converted(text).text.replace("]\n", ']"\n')


def test_words_of_yaml() -> None:
    assert [resolve(text) for text in ("", "~", "null", "NULL", "nUll")] == [None] * 4 + ["nUll"]
    assert math.isnan(resolve(".nan"))  # type: ignore[arg-type]
    assert [show(resolve(text)) for text in (".inf", "-.INF", ".NaN")] == ["+Inf", "-Inf", "NaN"]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2024-01-01", "2024-01-01T00:00:00Z"),
        ("2024-1-2", "2024-01-02T00:00:00Z"),
        ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05Z"),
        ("2024-01-02t3:4:5.50+02:00", "2024-01-02T03:04:05.5+02:00"),
        ("2024-01-02 03:04:05", "2024-01-02T03:04:05Z"),
        ("2024-13-01", None),
        ("24-01-01", None),
    ],
)
def test_moments(text: str, moment: str | None) -> None:
    found = resolve(text)
    assert isinstance(found, Moment) == (moment is not None)
    assert found == (moment or text)


def test_a_truth_may_be_said_in_words_of_old() -> None:
    assert [truth(resolve(text)) for text in ("yes", "On", "n", "off", "true")] == [
        *(True, True, False, False, True),
    ]
    assert truth("maybe") is None
    assert truth(1) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_printed_so_that_it_is_the_same(number: float) -> None:
    assert float(show(number)) == number


@given(st.text(max_size=20))
def test_any_text_is_something(text: str) -> None:
    resolve(text)
