"""``python -m benchmarks.gpu``: the rows worth measuring on an accelerator.

The methods of ``emaopt.scan``, and averages of 50 M and 1 B parameters beside
``optax.ema`` and the memory ceiling. Prints a table for RESULTS.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import emaopt
from benchmarks import sequences, timing, updates


def main() -> None:
    """All rows, on the default device."""
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {jax.default_backend()}\n")
    print(timing.HEADER, flush=True)
    rng = np.random.default_rng(0)
    for steps, width in [(10_000, 1), (100_000, 64), (1_000_000, 1), (10_000, 1024)]:
        x = jnp.asarray(rng.normal(size=(steps, width)), jnp.float32)
        for method in ("scan", "blocked", "associative"):
            compiled = jax.jit(
                lambda values, method=method: sequences.ours(
                    values, sequences.DECAY, method
                )
            )
            peers = {"lax.associative_scan": sequences.jitted(sequences.merged, x)}
            if steps <= 10_000:
                peers["lax.scan"] = sequences.jitted(sequences.plain, x)
            timing.compare(
                f"{method} {steps:,} x {width}",
                lambda compiled=compiled, x=x: compiled(x),
                peers,
                rounds=7,
            )
    for params in (50_000_000, 1_000_000_000):
        for options, moved in [({}, 20), ({"compensated": True}, 28)]:
            average = emaopt.params_ema(updates.DECAY, **options)
            peers = {f"x + 1, to be scaled by {moved}/8": updates.Memory(params, 10)}
            if not options:
                peers["optax.ema"] = updates.Loop(
                    optax.ema(updates.DECAY), params, 10, emits=True
                )
            timing.compare(
                f"params_ema {options or ''}, {params // 1_000_000:,} M",
                updates.Loop(average, params, 10),
                peers,
                rounds=9,
            )


if __name__ == "__main__":
    main()
