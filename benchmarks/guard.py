"""``python -m benchmarks.guard``: fails when speed is really lost, against peers.

Ratios of times measured in turn, with room for a noisy machine: each limit is about
half of what is measured on an idle one (RESULTS.md), and counts only if it is missed
three times in a row.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import emaopt
from benchmarks import sequences, startup, timing, updates

ATTEMPTS = 3


def main() -> None:
    """Measures all; exits with 1 if any ratio is below its limit every time."""
    print(timing.HEADER, flush=True)
    lost = [row for row in map(_best, _checks()) if row.verdict == "not met"]
    for row in lost:
        print(f"lost: {row.work} {row.ratio:.2f}, limit {row.target}", file=sys.stderr)
    sys.exit(bool(lost))


def _checks() -> list[Callable[[], timing.Row]]:
    return [
        lambda: _scan(200_000, 1, 1.0),
        lambda: _scan(20_000, 64, 0.35),
        lambda: _scan(2_500, 1024, 0.35),
        _update,
        _compile,
    ]


def _best(check: Callable[[], timing.Row]) -> timing.Row:
    """The first row that meets its limit, else the last."""
    for _ in range(ATTEMPTS):
        row = check()
        if row.verdict == "met":
            break
    return row


def _scan(steps: int, width: int, limit: float) -> timing.Row:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(steps, width)), jnp.float32)
    return _row(
        f"scan {steps:,} x {width}",
        sequences.jitted(sequences.ours, x),
        {"lax.scan": sequences.jitted(sequences.plain, x)},
        limit,
    )


def _update() -> timing.Row:
    ours = updates.Loop(emaopt.params_ema(updates.DECAY), 10_000_000, 10)
    theirs = updates.Loop(optax.ema(updates.DECAY), 10_000_000, 10, emits=True)
    return _row("params_ema, 10 M", ours, {"optax.ema": theirs}, 0.7)


def _compile() -> timing.Row:
    ours, theirs = emaopt.params_ema(0.999), optax.ema(0.999)
    return startup.compiled("trace and compile 100 leaves", 100, ours, theirs, 3)


def _row(work: str, ours: Any, peer: dict[str, Any], limit: float) -> timing.Row:
    targets = dict.fromkeys(peer, limit)
    return timing.compare(work, ours, peer, targets, seconds=2)[0]


if __name__ == "__main__":
    main()
