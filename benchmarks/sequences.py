"""Sequences: emaopt.scan beside pandas, Polars, Numba, SciPy and plain lax.scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import emaopt
from benchmarks import timing

DECAY = 0.999
# (T, D) with the targets of each peer.
SHAPES: list[tuple[int, int, dict[str, float]]] = [
    (1_000, 1, {}),
    (10_000, 1, {}),
    (100_000, 1, {}),
    (
        1_000_000,
        1,
        {"pandas": 5, "Polars": 3, "Numba": 1.5, "SciPy": 1.5, "lax.scan": 1.2},
    ),
    (10_000_000, 1, {}),
    (10_000, 64, {}),
    (
        100_000,
        64,
        {"pandas": 9, "Polars": 4, "Numba": 0.35, "SciPy": 10, "lax.scan": 0.75},
    ),
    (400_000, 64, {}),
    (2_500, 1024, {}),
    (10_000, 1024, {"lax.scan": 0.7}),
    (20_000, 1024, {}),
    (256, 65_536, {}),
]


def plain(values: jax.Array, decay: Any) -> jax.Array:
    """What one writes by hand: a debiased average in one lax.scan."""

    def step(carry: Any, x: jax.Array) -> Any:
        m, power = carry
        m, power = decay * m + (1 - decay) * x, decay * power
        return (m, power), m / (1 - power)

    start = jnp.zeros_like(values[0]), jnp.ones((), values.dtype)
    return lax.scan(step, start, values)[1]


def merged(values: jax.Array, decay: Any) -> jax.Array:
    """The same by lax.associative_scan."""
    steps = jnp.arange(1, len(values) + 1)[:, None]

    def after(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    each = jnp.full((len(values), 1), decay), (1 - decay) * values
    return lax.associative_scan(after, each)[1] / (1 - decay**steps)


def ours(values: jax.Array, decay: Any, method: str = "auto") -> jax.Array:
    """The corrected averages of a sequence."""
    start = emaopt.init(jnp.zeros_like(values[0]), compensated=True)
    return emaopt.scan(start, values, decay, method=method)[1]


def main() -> list[timing.Row]:
    """All rows of sequences."""
    rows = []
    rng = np.random.default_rng(0)
    for steps, width, targets in SHAPES:
        x = rng.normal(size=(steps, width)).astype(np.float32)
        rows += timing.compare(
            f"scan {steps:,} x {width}",
            jitted(ours, jnp.asarray(x)),
            _peers(x),
            targets,
        )
    for steps, width, target in [
        (1_000_000, 1, 1.2),
        (100_000, 64, 0.9),
        (10_000, 1024, 0.9),
    ]:
        x = jnp.asarray(rng.normal(size=(steps, width)), jnp.float32)
        rows += timing.compare(
            f"gradient of scan {steps:,} x {width}",
            _gradient(ours, x),
            {"lax.scan": _gradient(plain, x)},
            {"lax.scan": target},
        )
    for steps, width in [(1_000_000, 1), (100_000, 64), (10_000, 1024)]:
        rows += _masked(rng, steps, width)
    return rows


def jitted(function: Any, x: jax.Array) -> Any:
    """A call of the compiled function, at the decay of the benchmarks."""
    compiled = jax.jit(lambda values: function(values, DECAY))
    return lambda: compiled(x)


def _gradient(function: Any, x: jax.Array) -> Any:
    def loss(values: jax.Array, decay: jax.Array) -> jax.Array:
        return jnp.sum(function(values, decay) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1)))
    decay = jnp.float32(DECAY)
    return lambda: compiled(x, decay)


def _masked(rng: np.random.Generator, steps: int, width: int) -> list[timing.Row]:
    """A tenth of the values missing, against pandas and a plain lax.scan."""
    import pandas as pd

    x = rng.normal(size=(steps, width)).astype(np.float32)
    seen = rng.uniform(size=steps) < 0.9
    x[~seen] = np.nan
    frame, values, mask = pd.DataFrame(x), jnp.asarray(x), jnp.asarray(seen)

    def hold(values: jax.Array, mask: jax.Array) -> jax.Array:
        start = emaopt.init(jnp.zeros_like(values[0]), compensated=True)
        return emaopt.scan(start, values, DECAY, observed=mask)[1]

    def by_hand(values: jax.Array, mask: jax.Array) -> jax.Array:
        def step(carry: Any, inputs: Any) -> Any:
            x, seen = inputs
            m, power = carry
            new = DECAY * m + (1 - DECAY) * jnp.where(seen, x, 0)
            m, power = jnp.where(seen, new, m), jnp.where(seen, DECAY * power, power)
            return (m, power), m / (1 - power)

        start = jnp.zeros_like(values[0]), jnp.ones(())
        return lax.scan(step, start, (values, mask))[1]

    mine, theirs = jax.jit(hold), jax.jit(by_hand)
    window = frame.ewm(alpha=1 - DECAY, ignore_na=True)
    return timing.compare(
        f"masked scan {steps:,} x {width}",
        lambda: mine(values, mask),
        {"pandas": lambda: window.mean(), "lax.scan": lambda: theirs(values, mask)},
    )


def _peers(x: np.ndarray) -> dict[str, Any]:
    """The same averages by other means; what is too slow for a shape is left out."""
    import numba
    import pandas as pd
    import polars as pl
    import scipy.signal

    frame = pd.DataFrame(x)
    columns = pl.DataFrame({str(i): x[:, i] for i in range(x.shape[1])})
    alpha = 1 - DECAY

    @numba.njit
    def loop(x: np.ndarray, decay: float) -> np.ndarray:
        out = np.empty_like(x)
        m = np.zeros(x.shape[1])
        power = 1.0
        for t in range(x.shape[0]):
            power *= decay
            for i in range(x.shape[1]):
                m[i] = decay * m[i] + (1 - decay) * x[t, i]
                out[t, i] = m[i] / (1 - power)
        return out

    def filtered() -> np.ndarray:
        weight = 1 - DECAY ** np.arange(1, len(x) + 1, dtype=np.float64)
        m = scipy.signal.lfilter(
            [np.float32(alpha)], np.float32([1, -DECAY]), x, axis=0
        )
        return m / weight[:, None].astype(np.float32)

    device = jnp.asarray(x)
    peers = {
        "pandas": lambda: frame.ewm(alpha=alpha).mean(),
        "Polars": lambda: columns.select(pl.all().ewm_mean(alpha=alpha)),
        "Numba": lambda: loop(x, DECAY),
        "SciPy": filtered,
        "lax.scan": jitted(plain, device),
    }
    if x.shape[1] > 64:
        del peers["Polars"]
    if x.size <= 1_000_000:
        peers["lax.associative_scan"] = jitted(merged, device)
    return peers
