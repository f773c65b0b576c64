"""Tracing, compiling, importing, and the first call."""

import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import emaopt
from benchmarks import timing

# Which arguments stay Python numbers under inject_hyperparams.
_STATIC = ("every", "start")


def main() -> list[timing.Row]:
    """All rows of what happens before the first step."""
    rows = []
    for leaves in (10, 100, 1_000):
        traced = optax.inject_hyperparams(emaopt.params_ema, static_args=_STATIC)
        rows += [
            _compiled(leaves, "Python decay", emaopt.params_ema(0.999), 1 / 1.3),
            _compiled(leaves, "traced decay", traced(decay=0.999), 1 / 1.6),
        ]
    rows.append(_imported())
    return rows


def _compiled(leaves: int, kind: str, average: Any, target: float) -> timing.Row:
    """Processor time to trace and compile a step, against optax.ema in its place."""
    params = {f"layer_{i}": jnp.ones((8, 8)) for i in range(leaves)}

    def seconds(average: Any) -> float:
        state = average.init(params)

        def step(params: Any, state: Any, updates: Any) -> Any:
            updates, state = average.update(updates, state, params)
            return optax.apply_updates(params, updates), state

        start = time.process_time()
        jax.jit(step).lower(params, state, params).compile()
        return time.process_time() - start

    plain = optax.ema(0.999)
    seconds(average), seconds(plain)
    pairs = [(seconds(average), seconds(plain)) for _ in range(5)]
    target_here = target if leaves == 1_000 else None
    return _row(
        f"trace and compile {leaves:,} leaves, {kind}", "optax.ema", pairs, target_here
    )


def _imported() -> timing.Row:
    """``import emaopt`` against ``import optax``, in fresh processes."""

    def seconds(name: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
        return time.perf_counter() - start

    seconds("emaopt"), seconds("optax")
    pairs = [(seconds("emaopt"), seconds("optax")) for _ in range(7)]
    return _row("import emaopt", "import optax", pairs, 1 / 1.1)


def _row(work: str, peer: str, pairs: Any, target: float | None) -> timing.Row:
    ours, theirs = np.array(pairs).T
    low, middle, high = np.quantile(theirs / ours, [0.25, 0.5, 0.75])
    row = timing.Row(
        work,
        peer,
        1e3 * float(np.median(ours)),
        1e3 * float(np.median(theirs)),
        float(middle),
        float(low),
        float(high),
        target,
    )
    print(timing.line(row), flush=True)
    return row
