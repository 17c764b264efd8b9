"""Whether replicas can stand together: the search against brute force.

How: small random mixes, each also tried in every possible placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.config.fit import REPLICAS_MAX, Want, fits

DEVICES = ("g0", "g1", "g2")
WANTS = st.builds(
    Want,
    memory_mib=st.none() | st.integers(1, 8),
    device_count=st.integers(1, 3),
    devices=st.none() | st.frozensets(st.sampled_from(DEVICES)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WANTS, max_size=4), st.lists(st.integers(1, 8), min_size=3, max_size=3))
def test_exact(wants: list[Want], sizes: list[int]) -> None:
    totals = dict(zip(DEVICES, sizes, strict=True))
    assert fits(wants, totals) == any_placement(wants, totals)


def any_placement(wants: Sequence[Want], totals: Mapping[str, int]) -> bool:
    choices = [
        [c for c in combinations(totals, w.device_count) if w.devices is None or w.devices >= {*c}]
        for w in wants
    ]
    return any(is_placement(wants, chosen, totals) for chosen in product(*choices))


def is_placement(
    wants: Sequence[Want], chosen: Sequence[tuple[str, ...]], totals: Mapping[str, int]
) -> bool:
    for device, total in totals.items():
        here = [w for w, devices in zip(wants, chosen, strict=True) if device in devices]
        if any(w.memory_mib is None for w in here) and len(here) > 1:
            return False
        if sum(w.memory_mib or 0 for w in here) > total:
            return False
    return True


def test_a_hard_mix_is_answered_in_bounded_steps() -> None:
    totals = {f"g{n}": 100 for n in range(16)}
    assert fits([Want(51) for _ in range(16)], totals)
    assert not fits([Want(51) for _ in range(17)], totals)  # alike devices are tried once
    assert fits([Want(34 + n % 7) for n in range(45)], totals)  # past the bound: benefit of doubt
    assert fits([Want(1_000)] * (REPLICAS_MAX + 1), totals)
