"""``python -m benchmarks.accuracy``: errors against float64, ours and peers'."""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import emaopt
from benchmarks.sequences import plain

DECAYS = (0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
ULP = 2.0**-23


def values(steps: int) -> np.ndarray:
    """Columns of noise, a constant, a drift, and values spread over 12 decades."""
    rng = np.random.default_rng(0)
    columns = [
        rng.normal(size=steps),
        np.full(steps, 1.7),
        1 + 3 * np.arange(steps) / steps,
        10 ** rng.uniform(-6, 6, steps),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def reference(x: np.ndarray, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """The corrected averages of x and of |x|, in float64."""
    average, size = np.empty(x.shape), np.empty(x.shape)
    m, n, w = np.zeros(x.shape[1]), np.zeros(x.shape[1]), 0.0
    for t, row in enumerate(x.astype(np.float64)):
        m = decay * m + (1 - decay) * row
        n = decay * n + (1 - decay) * np.abs(row)
        w = decay * w + (1 - decay)
        average[t], size[t] = m / w, n / w
    return average, size


def _scan(method: str) -> Callable:
    def run(x: jax.Array, decay: float) -> jax.Array:
        start = emaopt.init(jnp.zeros_like(x[0]), compensated=True)
        return emaopt.scan(start, x, decay, method=method)[1]

    return run


def _transformed(transformation: Callable) -> Callable:
    def run(x: jax.Array, decay: float) -> jax.Array:
        average = transformation(decay)

        def step(state: Any, row: jax.Array) -> Any:
            out, state = average.update(row, state)
            return state, out

        return jax.lax.scan(step, average.init(x[0]), x)[1]

    return run


FORMS: dict[str, Callable] = {
    "emaopt.ema_scan": lambda x, decay: emaopt.ema_scan(x, decay)["corrected"],
    'emaopt.scan, "blocked"': _scan("blocked"),
    'emaopt.scan, "associative"': _scan("associative"),
    "emaopt.ema, compensated": _transformed(
        lambda decay: emaopt.ema(decay, compensated=True)
    ),
    "emaopt.ema": _transformed(emaopt.ema),
    "optax.ema": _transformed(optax.ema),
    "lax.scan by hand": plain,
}


def measure(steps: int, decays: tuple[float, ...] = DECAYS) -> dict[str, list[float]]:
    """For each form, the largest error at each decay, in ulp of the average of |x|."""
    x = values(steps)
    errors: dict[str, list[float]] = {name: [] for name in FORMS}
    for decay in decays:
        average, size = reference(x, decay)
        for name, form in FORMS.items():
            result = jax.jit(form, static_argnums=1)(x, decay)
            worst = np.max(np.abs(np.asarray(result, np.float64) - average) / size)
            errors[name].append(float(worst) / ULP)
    return errors


def table(errors: dict[str, list[float]], decays: tuple[float, ...] = DECAYS) -> str:
    """The errors as Markdown."""
    lines = [
        "| ulp | " + " | ".join(f"{decay:g}" for decay in decays) + " |",
        "|---|" + "---|" * len(decays),
    ]
    for name, row in errors.items():
        lines.append(f"| {name} | " + " | ".join(f"{e:.3g}" for e in row) + " |")
    return "\n".join(lines)


def plot(errors: dict[str, list[float]], decays: tuple[float, ...] = DECAYS) -> Any:
    """The errors against the decay, as a figure."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    at = np.arange(len(decays))
    for name, row in errors.items():
        style = "-" if name.startswith("emaopt") else "--"
        axes.plot(at, np.maximum(row, 0.3), style, marker="o", ms=3, label=name)
    axes.set_yscale("log")
    axes.set_xticks(at, [f"{decay:g}" for decay in decays])
    axes.set_xlabel("decay")
    axes.set_ylabel("largest error, ulp of the average of |x|")
    axes.axhline(4, color="0.6", lw=0.8, zorder=0)
    axes.legend(fontsize="small")
    return figure


def main() -> None:
    """Prints the table; with --plot, writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--plot", type=Path, help="a PNG or SVG file to write")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = measure(arguments.steps)
    print(f"{arguments.steps:,} steps of noise, a constant, a drift, and 12 decades\n")
    print(table(errors))
    if arguments.plot is not None:
        plot(errors).savefig(arguments.plot, dpi=150)
        print(f"\nwrote {arguments.plot}")


if __name__ == "__main__":
    main()
