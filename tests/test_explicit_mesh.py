"""On an explicit mesh, where shardings are part of types and must agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import emaopt

SPEC = PartitionSpec(None, "d")


@pytest.fixture
def values(rng):
    """Six steps of four features, which are sharded over four devices."""
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Explicit,), devices=devices)
    # jax 0.7 had the context manager under another name.
    use = getattr(jax.sharding, "use_mesh", None) or jax.set_mesh
    with use(mesh):
        x = rng.normal(size=(6, 4)).astype(np.float32)
        yield jax.device_put(x, NamedSharding(mesh, SPEC))


def reference(x, decay):
    m, w, out = 0.0, 0.0, []
    for row in np.asarray(x, np.float64):
        m, w = decay * m + (1 - decay) * row, decay * w + 1 - decay
        out.append(m / w)
    return np.array(out)


@pytest.mark.parametrize("form", [emaopt.ema_scan, jax.jit(emaopt.ema_scan)])
def test_ema_scan(values, form):
    out = form(values, jnp.float32(0.9))
    assert out["corrected"].sharding.spec == SPEC
    np.testing.assert_allclose(
        out["corrected"],
        reference(values, np.float32(0.9)),
        rtol=0,
        atol=4 * 2**-23 * 4,
    )


@pytest.mark.parametrize("method", ["scan", "associative"])
def test_scan(values, method):
    start = emaopt.init(values[0], compensated=True)
    state, averages = emaopt.scan(start, values, 0.9, method=method)
    assert averages.sharding.spec == SPEC
    assert state.m.sharding == values[0].sharding
    np.testing.assert_allclose(
        averages, reference(values, 0.9), rtol=0, atol=8 * 2**-23 * 4
    )


def test_merge(values):
    start = emaopt.init(values[0], compensated=True)
    parts = [emaopt.scan(start, part, 0.9)[0] for part in (values[:2], values[2:])]
    merged = emaopt.merge(*parts)
    assert merged.m.sharding == parts[0].m.sharding
    np.testing.assert_allclose(
        emaopt.corrected(merged),
        reference(values, 0.9)[-1],
        rtol=0,
        atol=4 * 2**-23 * 4,
    )
