"""What a plain YAML scalar is to llama-swap, and how it prints one into a command.

Its parser, Go's yaml.v3, follows YAML 1.2 with a few habits of 1.1: `yes` and `on` are text,
`1e6` is a number, `010` is octal, `12:30:45` is text. Our own files know none of this (see
`rota.config.document`); here it decides what a macro puts into a command line, so it is
followed to the letter. A YAML library's own rules were refused: each differs somewhere.
"""

from __future__ import annotations

import re
from datetime import datetime

Scalar = None | bool | int | float | str

YAML_TAG = "tag:yaml.org,2002:"
UINT64_MAX = 2**64 - 1
INT64_MIN = -(2**63)

_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}

# Where text stands for a truth, the words of YAML 1.1 do too.
_TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"n", "N", "no", "No", "NO", "off", "Off", "OFF"})

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INT = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<bin>[01]+)|0[oO](?P<oct>[0-7]+)"
    r"|0(?P<old>[0-7]+)|(?P<dec>0|[1-9][0-9]*))",
    re.ASCII,
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "old": 8, "dec": 10}
_MOMENT = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:(?:[Tt](\d{1,2}):(\d{1,2}):(\d{1,2})(\.\d+)?(Z|[-+]\d\d:\d\d))"
    r"|(?: (\d{1,2}):(\d{1,2}):(\d{1,2})(\.\d+)?))?",
    re.ASCII,
)


class Moment(str):
    """A date or a time of day: text wherever text is wanted, and no value for a macro."""

    __slots__ = ()


def resolve(text: str) -> Scalar:
    """What a scalar is that was written without quotes and without a tag."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] == ".":
        return _float(text)
    if text[0] not in "+-0123456789":
        return text
    moment = _moment(text)
    if moment is not None:
        return moment
    plain = text.replace("_", "")
    number = _int(plain)
    return number if number is not None else _float(plain, otherwise=text)


def resolve_tagged(text: str, kind: str) -> Scalar:
    """What a scalar with a tag of YAML's own is (`kind` is `int` of `!!int`).

    Raises:
        ValueError: the text is nothing of that kind.
    """
    value = resolve(text) if text else None
    match kind, value:
        case "int", int() if not isinstance(value, bool):
            return value
        case "float", int() | float() if not isinstance(value, bool):
            return float(value)
        case ("bool", bool()) | ("null", None) | ("timestamp", Moment()):
            return value
        case (("int" | "float" | "bool" | "null" | "timestamp"), _):
            raise ValueError(f"`{text[:40]}` is no !!{kind}")
        case _:
            return text


def truth(value: Scalar) -> bool | None:
    """The truth that a value stands for where one is wanted; None: none at all."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in _TRUE | _FALSE:
        return value in _TRUE
    return None


def show(value: Scalar) -> str:
    """A value as it is printed into a text (Go's `%v`)."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return _show_float(value)
        case None:
            return "<nil>"
        case _:
            return str(value)


def _show_float(value: float) -> str:
    """The fewest digits that tell it apart; with an exponent below 1e-04 and from 1e+06 on
    (strconv.FormatFloat, format g, in its shortest form)."""
    if value != value:  # noqa: PLR0124  # what is not a number is not itself
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    sign = "-" if repr(value).startswith("-") else ""
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return sign + "0"
    lead = len(whole) if whole != "0" else len(fraction.lstrip("0")) - len(fraction)
    power = lead - 1 + int(exponent or 0)
    digits = digits.rstrip("0")
    if power < -4 or power >= 6:
        body = digits[0] + (f".{digits[1:]}" if len(digits) > 1 else "")
        return f"{sign}{body}e{'-' if power < 0 else '+'}{abs(power):02}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    if len(digits) <= power + 1:
        return sign + digits.ljust(power + 1, "0")
    return f"{sign}{digits[: power + 1]}.{digits[power + 1 :]}"


def _int(plain: str) -> int | None:
    match = _INT.fullmatch(plain)
    if match is None or match.lastgroup is None or len(plain) > 80:
        return None
    kind = next(kind for kind in _BASES if match[kind] is not None)
    number = int(match[kind], _BASES[kind])
    number = -number if match["sign"] == "-" else number
    return number if INT64_MIN <= number <= UINT64_MAX else None


def _float(plain: str, otherwise: str | None = None) -> Scalar:
    """A number, or the text where it is none, or is beyond what 64 bits hold."""
    otherwise = plain if otherwise is None else otherwise
    if not _FLOAT.fullmatch(plain):
        return otherwise
    number = float(plain)
    return otherwise if number in (float("inf"), float("-inf")) else number


def _moment(text: str) -> Moment | None:
    match = _MOMENT.fullmatch(text)
    if match is None:
        return None
    year, month, day = (int(match[n]) for n in (1, 2, 3))
    hour, minute, second = (int(match[n] or match[n + 5] or 0) for n in (4, 5, 6))
    try:
        moment = datetime(year, month, day, hour, minute, second)  # noqa: DTZ001  # only checked
    except ValueError:
        return None
    fraction = (match[7] or match[12] or "").rstrip("0").rstrip(".")
    return Moment(f"{moment.isoformat()}{fraction}{match[8] or 'Z'}")
