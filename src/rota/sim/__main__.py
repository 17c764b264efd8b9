"""`scripts/sim N [--seed S] [--endless]`: play N seeds, the first of which is printed first."""

from __future__ import annotations

import secrets
import sys
import time

import click

from rota.sim.run import Report, SimulationError, simulate

TWICE_EVERY = 20
"""Every so many seeds one is played twice: the same bytes must come of it."""


@click.command()
@click.argument("n", type=click.IntRange(1))
@click.option("--seed", type=int, help="The first seed; random if absent. The others follow it.")
@click.option("--endless", is_flag=True, help="Callers without end: bound the time to a grant.")
def main(n: int, seed: int | None, endless: bool) -> None:
    """Play N seeds in virtual time."""
    first = secrets.randbelow(10**9) if seed is None else seed
    click.echo(f"seed {first}" + (f" to {first + n - 1}" if n > 1 else ""))
    began_s = time.monotonic()
    reports: list[Report] = []
    for index in range(n):
        try:
            report = simulate(first + index, endless=endless)
            if index % TWICE_EVERY == 0:
                again = simulate(first + index, endless=endless)
                assert again.digest == report.digest, f"seed {first + index} plays differently"
        except SimulationError as error:
            click.echo(f"{error}\nfailed after {index} good seeds")
            sys.exit(1)
        reports.append(report)
    click.echo(summary(reports, time.monotonic() - began_s))


def summary(reports: list[Report], took_s: float) -> str:
    """One line of counts."""
    counts = [report.counts for report in reports]
    returned = sum(count.returned for count in counts)
    to_slot = sum(count.returned_to_slot for count in counts)
    parts = [
        f"{len(reports)} seeds",
        f"{sum(report.steps for report in reports)} steps",
        f"{sum(count.arrivals for count in counts)} arrivals",
        f"{sum(count.grants for count in counts)} grants",
        f"{sum(report.loads for report in reports)} loads",
        f"{sum(count.told for count in counts)} told to return",
        f"{returned} did, {to_slot} of them straight into a slot",
        f"{sum(count.refused for count in counts)} refused for good",
        f"{sum(count.left for count in counts)} left",
    ]
    worst = max(report.share_of_bound for report in reports)
    if worst:
        longest = max(reports, key=lambda report: report.share_of_bound)
        parts.append(
            f"longest wait {longest.longest_ms / 1_000:.0f} s, {worst:.0%} of its bound W = "
            f"{longest.bound_ms / 1_000:.0f} s"
        )
    parts.append(f"peace {max(r.peace_ms for r in reports) / 1000:.0f} s")
    return ", ".join(parts) + f"; {took_s:.1f} s"


if __name__ == "__main__":
    main()
