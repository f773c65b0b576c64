"""On an explicit mesh, where shardings are part of types and must agree."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import emaopt

SPEC = PartitionSpec(None, "d")


@contextlib.contextmanager
def mesh_of(kind=AxisType.Explicit, shape=(4,), names=("d",)):
    """The mesh in use, of four devices."""
    kinds = (kind,) * len(shape)
    mesh = jax.make_mesh(shape, names, kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def values(rng):
    """Six steps of four features, which are sharded over four devices."""
    with mesh_of() as mesh:
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


WINDOWS = {
    "mean": {"decay": 0.9, "min_periods": 2},
    "var": {"decay": 0.9, "ignore_na": True},
    "std": {"decay": 0.9, "adjust": False},
    "cov": {"decay": 0.9},
    "corr": {"times": np.arange(6.0), "halflife": -1 / np.log2(0.9)},
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", WINDOWS)
def test_ewm(rng, kind, name):
    x, y = rng.normal(size=(2, 6, 4)).astype(np.float32)
    x[1, 0] = y[0, 3] = np.nan
    window = WINDOWS[name]
    flags = {key: window[key] for key in ("adjust", "ignore_na") if key in window}
    arrays = (x, y) if name in ("cov", "corr") else (x,)

    def function(*arrays):
        return getattr(emaopt, f"ewm_{name}")(*arrays, **window)

    value, size, _ = oracles.ewm(name, x, y, np.full(6, 0.9), rest=0.1, **flags)
    count = np.cumsum(np.isfinite(x), axis=0)
    value = np.where(count < window.get("min_periods", 0), np.nan, value)
    with mesh_of(kind) as mesh:
        arrays = [jax.device_put(a, NamedSharding(mesh, SPEC)) for a in arrays]
        for form in (function, jax.jit(function)):
            found = form(*arrays)
            assert found.sharding.is_equivalent_to(arrays[0].sharding, 2)
            found = np.asarray(found) / size
            np.testing.assert_allclose(found, value / size, rtol=0, atol=1e-6)


@pytest.mark.parametrize("decay", [0.9, np.float32(0.9)])
def test_ewm_mean_without_gaps(values, decay):
    found = emaopt.ewm_mean(values, decay)
    assert found.sharding.spec == SPEC
    np.testing.assert_allclose(
        found, reference(values, decay), rtol=0, atol=4 * 2**-23 * 4
    )


def test_ewm_along_another_axis(rng):
    """Between two that are sharded."""
    x = rng.normal(size=(2, 6, 2)).astype(np.float32)
    x[1, 2, 1] = np.nan
    spec = PartitionSpec("a", None, "d")
    with mesh_of(shape=(2, 2), names=("a", "d")) as mesh:
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        found = jax.jit(lambda x: emaopt.ewm_var(x, 0.9, axis=1))(sharded)
    assert found.sharding.spec == spec
    columns, found = (
        np.moveaxis(a, 1, 0).reshape(6, 4) for a in (x, np.asarray(found))
    )
    value, size, _ = oracles.ewm("var", columns, columns, np.full(6, 0.9))
    np.testing.assert_allclose(found / size, value / size, rtol=0, atol=1e-6)


def test_the_gradient_of_ewm_is_sharded_alike(values):
    def total(x):
        return jnp.sum(emaopt.ewm_var(x, 0.9, bias=True))

    def by_definition(x):
        return oracles.ewm("var", x, x, np.full(6, 0.9), bias=True)[0].sum()

    x, h = np.asarray(values, np.float64), 1e-5
    steps = h * np.eye(x.size).reshape(-1, *x.shape)
    rise = [by_definition(x + step) - by_definition(x - step) for step in steps]
    for form in (jax.grad(total), jax.jit(jax.grad(total))):
        found = form(values)
        assert found.sharding.spec == SPEC
        expected = np.reshape(rise, x.shape) / (2 * h)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
