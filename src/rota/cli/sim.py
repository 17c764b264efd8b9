"""The verb that plays: `rota sim` puts the real scheduler into random worlds, in virtual time.

The first seed is printed before anything is played, and each failure says how to see it again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import click

from rota.sim.mixes import table
from rota.sim.run import PEACE_MS, Report, SimulationError, simulate

TWICE_EVERY = 20
"""Every so many seeds one is played twice: the same bytes must come of it."""


def mixes() -> None:
    """Play the mixes of traffic that one rule decides, with the rule and without it."""
    for line in table():
        click.echo(line)


def worlds(n: int, seed: int | None, *, endless: bool) -> bool:
    """Play n seeds, from a random one if none is given.

    Returns: whether everything held.
    """
    first = secrets.randbelow(10**9) if seed is None else seed
    click.echo(f"seed {first}" + (f" to {first + n - 1}" if n > 1 else ""))
    began_s = time.monotonic()
    reports: list[Report] = []
    for index in range(n):
        is_twice = index % TWICE_EVERY == 0
        try:
            report = _play(first + index, is_twice=is_twice, endless=endless)
        except SimulationError as error:
            click.echo(f"{error}\nfailed after {len(reports)} good seeds")
            return False
        reports.append(report)
    click.echo(_summary(reports, time.monotonic() - began_s))
    return True


def _play(seed: int, *, is_twice: bool, endless: bool) -> Report:
    report = simulate(seed, endless=endless)
    if is_twice and simulate(seed, endless=endless).digest != report.digest:
        raise SimulationError(f"seed {seed} does not play the same twice")
    return report


def _summary(reports: Sequence[Report], took_s: float) -> str:
    """What was played and seen, in one line."""
    counts = [report.counts for report in reports]
    returned = sum(count.returned for count in counts)
    to_slot = sum(count.returned_to_slot for count in counts)
    parts = [
        f"{len(reports)} seeds",
        f"{sum(report.steps for report in reports)} steps",
        f"{sum(count.arrivals for count in counts)} arrivals",
        f"{sum(count.grants for count in counts)} grants",
        f"{sum(count.leases for count in counts)} leases",
        f"{sum(report.loads for report in reports)} loads",
        f"{sum(count.told for count in counts)} told to return",
        f"{returned} did, {to_slot} of them straight into a slot",
        f"{sum(count.refused for count in counts)} refused for good",
        f"{sum(count.left for count in counts)} left",
        _longest(reports),
    ]
    return ", ".join(parts) + f"; {took_s:.1f} s"


def _longest(reports: Sequence[Report]) -> str:
    """The longest wait beside its bound."""
    worst = max(reports, key=lambda report: report.share_of_bound)
    if worst.bound_ms:
        longest_s = max(report.longest_ms for report in reports) / 1_000
        worst_s, bound_s = worst.longest_ms / 1_000, worst.bound_ms / 1_000
        return (
            f"longest wait {longest_s:.0f} s; the one nearest to its bound {worst_s:.0f} s of "
            f"W = {bound_s:.0f} s, {worst.share_of_bound:.0%} (seed {worst.seed})"
        )
    peace_ms = max(report.peace_ms for report in reports)
    return f"all served {peace_ms / 1_000:.0f} s after the last fault (of {PEACE_MS // 1_000})"
