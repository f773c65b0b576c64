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
from benchmarks import sequences, timing

# Which arguments stay Python numbers under inject_hyperparams.
_STATIC = ("every", "start")


def main() -> list[timing.Row]:
    """All rows of what happens before the first step."""
    rows = []
    plain, inject = optax.ema(0.999), optax.inject_hyperparams
    known = emaopt.params_ema(0.999)
    traced = inject(emaopt.params_ema, static_args=_STATIC)(decay=0.999)
    for leaves in (10, 100, 1_000):
        limits = (1.3, 1.6) if leaves == 1_000 else (None, None)
        work = f"trace and compile {leaves:,} leaves, "
        rows += [
            compiled(work + "Python decay", leaves, known, plain, limits[0]),
            compiled(work + "traced decay", leaves, traced, plain, limits[1]),
        ]
    theirs = inject(optax.ema)(decay=0.999)
    row = compiled(work + "both traced", leaves, traced, theirs, None)
    rows.append(row._replace(peer="optax.ema, traced"))
    rows.append(_first_call())
    rows.append(_imported())
    return rows


def compiled(
    work: str, leaves: int, average: Any, plain: Any, at_most: float | None
) -> timing.Row:
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

    seconds(average), seconds(plain)
    pairs = [(seconds(average), seconds(plain)) for _ in range(5)]
    return _row(work, "optax.ema", pairs, at_most)


def _first_call() -> timing.Row:
    """A sequence's first call, compiling included, against a loop by hand."""
    x = jnp.ones((10_000, 8))

    def seconds(function: Any) -> float:
        jax.clear_caches()
        start = time.process_time()
        jax.block_until_ready(jax.jit(function)(x))
        return time.process_time() - start

    def ours(x: jax.Array) -> Any:
        return emaopt.ema_scan(x, sequences.DECAY)

    def plain(x: jax.Array) -> Any:
        return sequences.plain(x, sequences.DECAY)

    seconds(ours), seconds(plain)
    pairs = [(seconds(ours), seconds(plain)) for _ in range(5)]
    return _row("first call of ema_scan", "lax.scan", pairs, None)


def _imported() -> timing.Row:
    """``import emaopt`` against ``import optax``, in fresh processes."""

    def seconds(name: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
        return time.perf_counter() - start

    seconds("emaopt"), seconds("optax")
    pairs = [(seconds("emaopt"), seconds("optax")) for _ in range(7)]
    return _row("import emaopt", "import optax", pairs, 1.1)


def _row(work: str, peer: str, pairs: Any, at_most: float | None) -> timing.Row:
    """A row whose ratio may be no less than 1 / ``at_most``."""
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
        at_most and round(1 / at_most, 2),
    )
    print(timing.line(row), flush=True)
    return row
