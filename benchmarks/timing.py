"""Times contenders in turn, in one process, and compares them by ratios."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Row(NamedTuple):
    """One comparison: how often the time of ours goes into that of a peer."""

    work: str
    peer: str
    ours_ms: float
    peer_ms: float
    ratio: float  # above 1: ours is faster
    low: float  # quartiles of the ratios of the single rounds
    high: float
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the target was met."""
        if self.target is None:
            return ""
        return "met" if self.ratio >= self.target else "not met"


def compare(
    work: str,
    ours: Callable[[], Any],
    peers: dict[str, Callable[[], Any]],
    targets: dict[str, float] | None = None,
    *,
    seconds: float = 4.0,
    rounds: int = 15,
) -> list[Row]:
    """Runs all in turn, round after round, until the time or the rounds are used up."""
    contenders = {"ours": ours, **peers}
    for run in contenders.values():  # compile, allocate, fill caches
        jax.block_until_ready(run())
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    began = time.perf_counter()
    for done in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
        if done >= 4 and time.perf_counter() - began > seconds:
            break
    mine = np.array(times["ours"])
    rows = []
    for name in peers:
        ratios = np.array(times[name]) / mine
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        target = (targets or {}).get(name)
        row = Row(
            work,
            name,
            1e3 * float(np.median(mine)),
            1e3 * float(np.median(times[name])),
            float(middle),
            float(low),
            float(high),
            target,
        )
        rows.append(row)
        print(line(row), flush=True)
    return rows


HEADER = (
    "| work | peer | ours, ms | peer, ms | peer / ours | quartiles | target | |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """A row of the table."""
    target = "" if row.target is None else f"{row.target:g}"
    return (
        f"| {row.work} | {row.peer} | {row.ours_ms:.2f} | {row.peer_ms:.2f} "
        f"| {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} | {target} "
        f"| {row.verdict} |"
    )
