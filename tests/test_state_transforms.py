"""The state under JAX's transformations: loops, vmap, derivatives, donation, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import ULP, ema

import emaopt
from emaopt import _arithmetic, _decay


def averages(values, decay, observed=None, **options):
    """The corrected averages at every step, by ``lax.scan`` over ``update``."""
    observed = np.ones(len(values), bool) if observed is None else observed

    def step(state, xs):
        x, seen = xs
        state = emaopt.update(state, x, decay, observed=seen)
        return state, emaopt.corrected(state)

    state = emaopt.init(jax.ShapeDtypeStruct(values.shape[1:], values.dtype), **options)
    return lax.scan(step, state, (values, observed))[1]


def test_the_state_is_a_carry():
    x = jnp.float32([1, 2])
    state = emaopt.init(x, compensated=True)
    last, _ = lax.scan(lambda s, _: (emaopt.update(s, x, 0.9), None), state, None, 5)
    looped = lax.fori_loop(0, 5, lambda k, s: emaopt.update(s, x, 0.9), state)
    loop = functools.reduce(lambda s, _: emaopt.update(s, x, 0.9), range(5), state)
    for other in (last, looped):
        for a, b in zip(*map(jax.tree.leaves, (other, loop)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2 * ULP, atol=1e-7)
    for seen in (True, False):
        held = lax.cond(
            seen, lambda s: emaopt.update(s, x, jnp.float32(0.9)), lambda s: s, state
        )
        assert int(held.count) == seen


def test_without_jit(rng):
    x = rng.normal(size=(4, 2)).astype(np.float32)
    with jax.disable_jit():
        out = averages(x, 0.9)
        held = emaopt.update(
            emaopt.init(x[0]), x[0], jnp.float32(0.9), observed=jnp.asarray(False)
        )
        scanned = emaopt.ema_scan(x, np.float32(0.9))["corrected"]
    expected = ema(x, 0.9).corrected
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(scanned, expected, rtol=0, atol=1e-6)
    assert held.count == 0


def test_vmap_over_values_and_decays(rng):
    x = rng.normal(size=(3, 5, 2)).astype(np.float32)
    decays = np.float32([0, 0.5, 0.99])
    seen = rng.uniform(size=(3, 5)) < 0.7
    seen[:, 0] = True
    out = jax.jit(jax.vmap(averages))(x, decays, seen)
    for k in range(3):
        expected = ema(x[k], decays[k], seen[k]).corrected
        np.testing.assert_allclose(out[k], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"compensated": True}], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9])
def test_derivatives(decay, options, x64, rng):
    x = rng.normal(size=(5, 2))
    x[2] = np.nan
    seen = np.array([True, True, False, True, True])
    c = rng.normal(size=(5, 2))

    def loss(x, decay):
        return jnp.sum(averages(x, decay, seen, **options) * c)

    def reference(x, decay):
        return np.sum(ema(x, decay, seen).corrected * c)

    by_x, by_decay = jax.jit(jax.grad(loss, (0, 1)))(x, np.float64(decay))
    h = 1e-6
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = h
        slope = (reference(x + step, decay) - reference(x - step, decay)) / (2 * h)
        slope = slope if seen[index[0]] else 0
        np.testing.assert_allclose(by_x[index], slope, atol=1e-8)
    slope = (reference(x, decay + h) - reference(x, decay - h)) / (2 * h)
    np.testing.assert_allclose(by_decay, slope, rtol=1e-6, atol=1e-6)
    tangents = (np.ones_like(x), np.float64(0.7))
    _, along = jax.jvp(loss, (x, np.float64(decay)), tangents)
    np.testing.assert_allclose(along, by_x.sum() + 0.7 * by_decay, rtol=1e-9)
    # The same for a decay that is known while tracing.
    static = jax.grad(lambda x: loss(x, decay))(x)
    np.testing.assert_allclose(static, by_x, rtol=1e-9, atol=1e-12)
    # And once more differentiated: backwards over forwards, since old versions of JAX
    # forget the rules of what a scan repeats when they go backwards twice.
    second = jax.grad(jax.jacfwd(loss, 1), 1)(x, np.float64(decay))
    h = 1e-4
    slope = reference(x, decay + h) - 2 * reference(x, decay)
    slope = (slope + reference(x, decay - h)) / h**2
    np.testing.assert_allclose(second, slope, rtol=1e-4, atol=1e-5)


def test_derivatives_by_the_state(x64):
    state = emaopt.init(jnp.ones(2), compensated=True)
    state = emaopt.update(state, jnp.array([2.0, 3.0]), 0.5)

    def mean(m):
        after = emaopt.update(state._replace(m=m), jnp.ones(2), 0.75)
        return jnp.sum(emaopt.corrected(after))

    np.testing.assert_allclose(jax.grad(mean)(state.m), 0.75 / (1 - 0.375), rtol=1e-12)


def test_a_donated_state_runs_on():
    step = jax.jit(lambda s, x: emaopt.update(s, x, 0.9), donate_argnums=0)
    for options in ({}, {"compensated": True}, {"warm_start": True}):
        x = jnp.ones(1000)
        state = emaopt.init({"a": x, "b": x}, **options)
        for _ in range(3):
            old = state
            state = step(state, {"a": x, "b": x})
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not x.is_deleted()
        np.testing.assert_allclose(emaopt.corrected(state)["a"], 1, rtol=ULP)
        memory = step.lower(state, {"a": x, "b": x}).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= sum(
            leaf.nbytes for leaf in jax.tree.leaves(state)
        )


def test_inside_shard_map(rng):
    mesh = jax.make_mesh(
        (4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    x = rng.normal(size=(3, 8, 2)).astype(np.float32)

    def body(x, decay):
        state = emaopt.init(x[0], compensated=True, per_element=True)
        state = emaopt.update(state, x[0], decay)
        state = emaopt.update(state, x[1], 0.5, observed=x[1] > 0)
        state = emaopt.merge(
            state, emaopt.init(x[0], compensated=True, per_element=True)
        )
        return emaopt.corrected(emaopt.update(state, x[2], decay))

    spec = P(None, "d")
    sharded = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, P()), out_specs=P("d"), check_vma=True
    )
    out = jax.jit(sharded)(x, jnp.float32(0.9))
    np.testing.assert_allclose(out, body(x, jnp.float32(0.9)), rtol=0, atol=1e-6)

    def scalars(x):
        state = emaopt.update(emaopt.init(x[0]), x[0], 0.9)
        return emaopt.corrected(state, x[0])

    sharded = jax.shard_map(scalars, mesh=mesh, in_specs=spec, out_specs=P("d"))
    np.testing.assert_allclose(jax.jit(sharded)(x), x[0], rtol=ULP)


@pytest.mark.parametrize("options", [{}, {"compensated": True}, {"per_element": True}])
def test_merge_is_the_stream_as_a_whole(options, rng):
    x = rng.normal(size=(9, 2)).astype(np.float32)
    decays = np.float32([0.9, 0, 0.5, 0.99, 0.3, 0.9, 0.8, 0.999, 0.4])
    empty = emaopt.init(x[0], **options)

    def chunk(low, high):
        state = empty
        for k in range(low, high):
            state = emaopt.update(state, x[k], decays[k])
        return state

    a, b, c = chunk(0, 1), chunk(1, 4), chunk(4, 9)
    left = emaopt.merge(emaopt.merge(a, b), c)
    right = emaopt.merge(a, emaopt.merge(b, c))
    expected = ema(x, decays)
    size = ema(np.abs(x), decays).m[-1]
    for state in (left, right, chunk(0, 9)):
        assert state.count == 9
        np.testing.assert_array_less(np.abs(state.m - expected.m[-1]) / size, 4 * ULP)
        np.testing.assert_allclose(
            state.weight,
            np.broadcast_to(expected.weight[-1], state.weight.shape)
            if state.weight.ndim
            else expected.weight[-1][0],
            rtol=4 * ULP,
        )
    assert np.max(left.decay_power) == 0
    for one in (emaopt.merge(empty, c), emaopt.merge(c, empty)):
        for found, wanted in zip(*map(jax.tree.leaves, (one, c)), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_merge_far_apart():
    x = np.repeat(np.float32([0, 1]), 1_000_000)[:, None]
    run = jax.jit(
        lambda state, x: lax.scan(
            lambda s, row: (emaopt.update(s, row, jnp.float32(0.999999)), None),
            state,
            x,
        )[0]
    )
    empty = emaopt.init(x[0], compensated=True)
    merged = emaopt.merge(run(empty, x[:1_000_000]), run(empty, x[1_000_000:]))
    b = np.float64(np.float32(0.999999))
    logs = 1_000_000 * np.log(b)
    exact = {
        "average": -np.expm1(logs) / -np.expm1(2 * logs),
        "weight": -np.expm1(2 * logs),
        "decay_power": np.exp(2 * logs),
    }
    found = {
        "average": emaopt.corrected(merged)[0],
        "weight": merged.weight,
        "decay_power": merged.decay_power,
    }
    for name, value in exact.items():
        np.testing.assert_allclose(found[name], value, rtol=4 * ULP, err_msg=name)
    assert merged.count == 2_000_000


def test_merge_drops_what_no_weight_is_left_of():
    for bad in (np.inf, np.nan):
        earlier = emaopt.update(emaopt.init(jnp.ones(2)), jnp.full(2, bad), 0.5)
        later = emaopt.update(emaopt.init(jnp.ones(2)), jnp.full(2, 3.0), 0.0)
        merged = emaopt.merge(earlier, later)
        np.testing.assert_array_equal(emaopt.corrected(merged), 3)
        warm = emaopt.init(jnp.full(2, 5.0), warm_start=True)
        np.testing.assert_array_equal(emaopt.corrected(emaopt.merge(earlier, warm)), 5)


def test_the_count_saturates():
    state = emaopt.init(jnp.ones(2))._replace(count=jnp.int32(2**31 - 2))
    for expected in (2**31 - 1, 2**31 - 1):
        state = emaopt.update(state, jnp.ones(2), 0.5)
        assert state.count == expected
    assert emaopt.merge(state, state).count == 2**31 - 1


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000, 12_345])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99, 0.9999, 1 - 2.0**-24])
def test_n_steps_as_one(decay, n):
    def power(decay, n):
        rate = _arithmetic.power(_decay.resolve(decay, None), n)
        return rate.decay, rate.alpha

    def exact(b):
        b = np.float64(b)
        return b**n, -np.expm1(n * np.log(b)) if b else 1.0

    narrow = np.float32(decay)
    known, wanted = power(decay, n), exact(decay)
    np.testing.assert_allclose(known, wanted, rtol=1e-15 * n, atol=1e-300)
    for found in (
        jax.jit(power, static_argnums=1)(narrow, n),
        jax.jit(power)(narrow, jnp.int32(n)),
    ):
        # 1 − βⁿ to a few ulp of itself, βⁿ to the same share of 1.
        np.testing.assert_allclose(found[1], exact(narrow)[1], rtol=2 * ULP)
        np.testing.assert_allclose(found[0], exact(narrow)[0], rtol=0, atol=2 * ULP)
    slope = jax.jit(jax.grad(lambda b: power(b, n)[0]))(narrow)
    np.testing.assert_allclose(
        slope, n * np.float64(narrow) ** (n - 1), rtol=1e-4, atol=1e-30
    )
