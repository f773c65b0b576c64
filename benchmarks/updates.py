"""Parameter averages: params_ema beside optax.ema, nnx.EMA, torch and the memory."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import emaopt
from benchmarks import timing

DECAY = 0.9999
# (parameters, leaves)
SIZES = [(1_000_000, 10), (10_000_000, 100), (50_000_000, 10), (50_000_000, 1000)]


class Loop:
    """A donated training step, called over and over on its own results."""

    def __init__(self, average: Any, params: int, leaves: int, emits: bool = False):
        """Compiles the step params + updates, fused with the average."""
        size = params // leaves
        self.params = [jnp.full(size, 1.0) for _ in range(leaves)]
        self.updates = [jnp.full(size, 1e-3) for _ in range(leaves)]
        self.state = average.init(self.params)

        def step(params: Any, state: Any, updates: Any) -> Any:
            after = optax.apply_updates(params, updates)
            if emits:
                # An average of updates, given the parameters: the way to average
                # parameters with optax.ema. It emits the corrected average.
                out, state = average.update(after, state)
                return after, state, out
            _, state = average.update(updates, state, params)
            return after, state, None

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> Any:
        """One step."""
        self.params, self.state, out = self.step(self.params, self.state, self.updates)
        return self.params, self.state, out


class Memory:
    """x + 1 in place: what the memory allows, scaled by the bytes that move."""

    def __init__(self, params: int, leaves: int):
        """Compiles x + 1, donated."""
        self.x = [jnp.ones(params // leaves) for _ in range(leaves)]
        self.step = jax.jit(lambda x: [leaf + 1 for leaf in x], donate_argnums=0)

    def __call__(self) -> Any:
        """One pass: 8 bytes for each parameter."""
        self.x = self.step(self.x)
        return self.x


class Adam:
    """A donated Adam step without an average."""

    def __init__(self, params: int, leaves: int):
        """Compiles the step."""
        optimizer = optax.adam(1e-3)
        self.params = [jnp.full(params // leaves, 1.0) for _ in range(leaves)]
        self.grads = [jnp.full(params // leaves, 1e-3) for _ in range(leaves)]
        self.state = optimizer.init(self.params)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> Any:
        """One step."""
        self.params, self.state = self.step(self.params, self.state, self.grads)
        return self.params, self.state


class Nnx:
    """The step params + updates and ``nnx.EMA``, by ``nnx.jit``, donated."""

    def __init__(self, params: int, leaves: int):
        """Makes the model and its average."""
        from flax import nnx

        class Model(nnx.Module):
            def __init__(self) -> None:
                for i in range(leaves):
                    setattr(self, f"w{i}", nnx.Param(jnp.full(params // leaves, 1.0)))

        self.model = Model()
        self.average = nnx.EMA(self.model, DECAY)
        self.updates = [jnp.full(params // leaves, 1e-3) for _ in range(leaves)]

        def step(model: Any, average: Any, updates: Any) -> None:
            for i, update in enumerate(updates):
                param = getattr(model, f"w{i}")
                param[...] = param[...] + update
            average.update(model)

        self.step = nnx.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> Any:
        """One step."""
        self.step(self.model, self.average, self.updates)
        return self.average.params


def main() -> list[timing.Row]:
    """All rows of updates."""
    rows = []
    for params, leaves in SIZES:
        large = params == 50_000_000 and leaves == 10
        for name, options, moved, share in [
            ("params_ema", {}, 20, 0.85),
            ("params_ema, compensated", {"compensated": True}, 28, 0.8),
        ]:
            ours = Loop(emaopt.params_ema(DECAY, **options), params, leaves)
            peers: dict[str, Any] = {
                f"x + 1, scaled by {moved}/8 bytes": Memory(params, leaves)
            }
            if not options:
                peers["optax.ema"] = Loop(optax.ema(DECAY), params, leaves, emits=True)
                peers["an Adam step"] = Adam(params, leaves)
                if leaves <= 100:  # both loop over leaves in Python, at every call
                    peers["nnx.EMA"] = Nnx(params, leaves)
                    peers |= _torch(params, leaves)
            work = f"{name}, {params // 1_000_000} M in {leaves:,} leaves"
            found = timing.compare(work, ours, peers, seconds=8)
            for row in found:
                if row.peer.startswith("x + 1"):
                    scale = moved / 8
                    row = row._replace(
                        peer_ms=row.peer_ms * scale,
                        ratio=row.ratio * scale,
                        low=row.low * scale,
                        high=row.high * scale,
                        target=share if large else None,
                    )
                if row.peer == "optax.ema" and large:
                    row = row._replace(target=2.0)
                rows.append(row)
    return rows


def _torch(params: int, leaves: int) -> dict[str, Any]:
    """AveragedModel with its multi-tensor average, where torch is installed."""
    try:
        import torch
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    except ImportError:
        return {}
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.ones(params // leaves)) for _ in range(leaves)]
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def step() -> None:
        with torch.no_grad():
            for p in model:
                p.add_(1e-3)
        average.update_parameters(model)

    return {"torch AveragedModel": step}
