"""Human units in the file, integers inside.

Every scalar of the file arrives here as text, so `10` and `"10"` are the same thing and no
YAML rule decides what a value is. A number that needs a unit and has none is refused: `10`
could be seconds, minutes or milliseconds, and a guess would be wrong for someone. For the same
reason `24G` is refused: it is 24 GB to one tool and 24 GiB to the next.
"""

from __future__ import annotations

import re
from fractions import Fraction

MIB = 1024 * 1024

# The longest duration and the largest memory that are taken seriously. Beyond them a figure is
# a slip of the hand, and arithmetic on it would only fail later.
DURATION_MS_MAX = 365 * 24 * 3_600_000
BYTES_MAX = 1 << 60

_DURATION_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_MEMORY_UNITS = {
    "b": 1,
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgt", start=1)},
    **{f"{p}b": 1000**n for n, p in enumerate("kmgt", start=1)},
}

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|[smhd]))+", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|[smhd])", re.ASCII)
_MEMORY = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)", re.ASCII)


def whole(text: str) -> int:
    """A whole number. Raises ValueError, saying what was expected."""
    if not re.fullmatch(r"-?[0-9]{1,15}", text, re.ASCII):
        raise ValueError(f"{_quote(text)} is not a whole number")
    return int(text)


def truth(text: str) -> bool:
    """`true` or `false`. Raises ValueError for anything else, `yes` and `on` included."""
    match text.lower():
        case "true":
            return True
        case "false":
            return False
        case _:
            raise ValueError(f"{_quote(text)} is neither true nor false")


def duration_ms(text: str) -> int:
    """`500ms`, `10s`, `1h30m`, `2d` or a bare 0, in milliseconds.

    Raises:
        ValueError: not a duration, without a unit, or over a year.
    """
    if text == "0":
        return 0
    if re.fullmatch(_NUMBER, text, re.ASCII):
        raise ValueError(f"{_quote(text)} has no unit; say {text}s or {text}m")
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{_quote(text)} is not a duration like 500ms, 10s, 5m or 1h30m")
    parts: list[tuple[str, str]] = _DURATION_PART.findall(text)
    total: int = sum(round(Fraction(number) * _DURATION_UNITS_MS[unit]) for number, unit in parts)
    if total > DURATION_MS_MAX:
        raise ValueError(f"{_quote(text)} is longer than a year")
    return total


def memory_bytes(text: str) -> int:
    """`8GiB`, `512MiB`, `24GB` (decimal) and the like, in bytes.

    Raises:
        ValueError: not an amount of memory, without a full unit, or over 1 EiB.
    """
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(f"{_quote(text)} is not an amount of memory like 8GiB or 512MiB")
    number, unit = match.groups()
    factor = _MEMORY_UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{_quote(text)} {_unit_advice(number, unit)}")
    total: int = round(Fraction(number) * factor)
    if total > BYTES_MAX:
        raise ValueError(f"{_quote(text)} is more than any machine has")
    return total


def _unit_advice(number: str, unit: str) -> str:
    prefix = unit[:1].upper()
    if not unit:
        return f"has no unit; say {number}GiB or {number}MiB"
    if prefix in "KMGT" and unit.lower() in {prefix.lower(), f"{prefix.lower()}i"}:
        return f"could be read two ways; say {number}{prefix}iB or {number}{prefix}B"
    return f"has an unknown unit; known are {', '.join(('B', 'KiB', 'MiB', 'GiB', 'TiB'))} and GB"


def show_duration(ms: int) -> str:
    """A duration as the file would say it: `1h30m`, `45s`, `500ms`, `0`."""
    if ms == 0:
        return "0"
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, ms = divmod(ms, _DURATION_UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def show_mib(mib: int) -> str:
    """An amount of memory for people: `512 MiB`, `8 GiB`, `7.5 GiB`."""
    if mib < 1024:
        return f"{mib} MiB"
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def _quote(text: str) -> str:
    """The text as the author wrote it, cut to what a line of a terminal bears."""
    shown = text if len(text) <= 40 else text[:39] + "…"
    return f"`{''.join(c if c.isprintable() else '·' for c in shown)}`"
