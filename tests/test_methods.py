"""The ways to run ``scan``: their bounds, the laws they all obey, and their choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import DECAYS, ULP, ema, ulps

import emaopt

METHODS = ("scan", "associative", "blocked")
each_method = pytest.mark.parametrize(
    "method", ["scan", pytest.param("associative", marks=pytest.mark.slow), "blocked"]
)
BOUND = {"scan": 4, "blocked": 4, "associative": 8}
T, D = 16, 2


def columns(steps, rng):
    """Noise, a constant, a drift, and 12 decades at random and in falling order."""
    t = np.arange(steps) / steps
    signs = rng.choice([-1.0, 1.0], steps)
    return np.float32(
        np.stack(
            [
                rng.normal(size=steps),
                np.full(steps, 0.1),
                1 + t,
                signs * 10 ** rng.uniform(-6, 6, steps),
                10 ** (6 - 12 * t),
            ],
            axis=1,
        )
    )


@pytest.fixture
def values(rng):
    return rng.normal(size=(T, D)).astype(np.float32)


def scanned(values, decay, method):
    state = emaopt.init(values[0], compensated=True)
    return emaopt.scan(state, values, decay, method=method)


# Traced decays, and known ones; tests of one shape share what is compiled.
run = jax.jit(scanned, static_argnames="method")
run_known = jax.jit(scanned, static_argnames=("decay", "method"))


def averages(values, decay, method):
    return run(values, decay, method)[1]


# Bounds.


@each_method
def test_the_bound_at_any_decay(method, rng):
    x = columns(3_000, rng)
    for decay in np.float32([*DECAYS[1:], 0.03, 0.49999, 0.75, 0.9375, 0.9993]):
        state, found = run(x, decay, method)
        error = ulps(found, x, decay).max(axis=0)
        np.testing.assert_array_less(error, BOUND[method], err_msg=f"decay {decay}")
        expected, size = ema(x, decay), ema(np.abs(x), decay)
        error = np.abs(state.m - expected.m[-1]) / (ULP * size.m[-1])
        np.testing.assert_array_less(error, BOUND[method], err_msg=f"decay {decay}")
        for part in ("weight", "decay_power"):
            exact = getattr(expected, part)[-1, 0]
            error = abs(getattr(state, part) - exact) / max(exact, 1e-6)
            assert error < BOUND[method] * ULP, (decay, part)
        assert state.count == 3_000
    error = ulps(run_known(x, 0.999, method)[1], x, 0.999).max(axis=0)
    np.testing.assert_array_less(error, BOUND[method])


@pytest.mark.slow
@each_method
def test_the_bound_where_the_past_outweighs_the_present(method, rng):
    # What is left of the first values is 1e-5 of them, and as large as the last.
    x = columns(100_000, rng)
    for decay in np.float32([0.999, 0.9999]):
        error = ulps(averages(x, decay, method), x, decay).max(axis=0)
        np.testing.assert_array_less(error, BOUND[method], err_msg=f"decay {decay}")


@pytest.mark.parametrize("fine", [False, True], ids=["by step", "by element"])
@pytest.mark.parametrize(
    "method", ["scan", pytest.param("associative", marks=pytest.mark.slow)]
)
def test_the_bound_where_decays_vary(method, fine, rng):
    x = columns(500, rng)
    shape = x.shape if fine else x.shape[:1]
    decays = np.float32(1 - 10 ** rng.uniform(-6.5, 0, shape))
    decays[rng.uniform(size=shape) < 0.01] = 0
    state = emaopt.init(x[0], compensated=True, per_element=fine)
    run = jax.jit(functools.partial(emaopt.scan, method=method))
    state, found = run(state, x, decays)
    expected, size = ema(x, decays), ema(np.abs(x), decays)
    error = np.abs(found - expected.corrected) / (ULP * size.corrected)
    assert error.max() < BOUND[method]
    weight = expected.weight[-1] if fine else expected.weight[-1, 0]
    error = np.abs(state.weight - weight) / (ULP * weight)
    assert error.max() < BOUND[method]


def test_known_decays_in_time_lose_no_digit():
    # In float32 they would round to 1, and nothing would ever enter the average.
    decays = np.full(4, 1 - 1e-9)
    state = emaopt.init(jnp.float32(0))
    for method in ("scan", "associative"):
        after, found = emaopt.scan(
            state, np.float32([1, 2, 3, 4]), decays, method=method
        )
        np.testing.assert_allclose(found, [1, 1.5, 2, 2.5], rtol=2 * ULP)
        np.testing.assert_allclose(after.weight, 4e-9, rtol=2 * ULP)


@each_method
def test_the_ends_of_the_range(method, rng):
    x = columns(3_000, rng)
    for function in (run, run_known):
        np.testing.assert_array_equal(function(x, 0.0, method)[1], x)
    for decay in np.float32([0.1, 0.75, 0.999999, 1 - 2.0**-24]):
        first = np.asarray(averages(x, decay, method)[0], np.float64)
        assert np.abs(first - x[0]).max() <= ULP * np.abs(x[0]).max()
        np.testing.assert_allclose(first, x[0], rtol=ULP)


def test_stretches_far_apart_merge():
    steps, decay = 1_000_000, 0.999999
    start = emaopt.init(jnp.float32(0), compensated=True)
    run = jax.jit(lambda x: emaopt.scan(start, x, decay, method="scan")[0])
    merged = emaopt.merge(run(jnp.zeros(steps)), run(jnp.ones(steps)))
    expected = (1 - decay**steps) / (1 - decay ** (2 * steps))
    np.testing.assert_allclose(emaopt.corrected(merged), expected, rtol=4 * ULP)
    assert merged.count == 2 * steps


# Laws.


@each_method
def test_an_average_is_linear_and_its_weights_sum_to_1(method, rng):
    x, y = rng.normal(size=(2, T, 1)).astype(np.float32)
    decay = np.float32(0.9)
    weights = jax.jit(jax.jacobian(lambda x: averages(x, decay, method)))(x)
    weights = np.asarray(weights)[:, 0, :, 0]
    assert weights.min() >= 0
    assert np.all(np.triu(weights, 1) == 0)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=8 * ULP)
    summed = averages(2 * x - 3 * y, decay, method)
    parts = 2 * averages(x, decay, method) - 3 * averages(y, decay, method)
    size = np.abs(2 * x).max() + np.abs(3 * y).max()
    np.testing.assert_allclose(summed, parts, rtol=0, atol=16 * ULP * size)
    np.testing.assert_allclose(
        averages(x, decay, method)[:, 0],
        weights @ x[:, 0],
        rtol=0,
        atol=16 * ULP * size,
    )


@each_method
def test_constant_in_constant_out_and_never_outside_the_values(method, rng):
    for decay in np.float32([0.1, 0.9, 0.999999]):
        constant = np.full((T, D), 0.1, np.float32)
        found = averages(constant, decay, method)
        np.testing.assert_allclose(found, constant, rtol=BOUND[method] * ULP)
        x = rng.normal(size=(T, D)).astype(np.float32)
        found = np.asarray(averages(x, decay, method))
        margin = BOUND[method] * ULP * np.abs(x).max()
        assert np.all(found <= np.maximum.accumulate(x) + margin)
        assert np.all(found >= np.minimum.accumulate(x) - margin)


@each_method
def test_vmap_is_the_loop(method, rng):
    x = rng.normal(size=(3, T, D)).astype(np.float32)
    decays = np.float32([0, 0.5, 0.999])
    starts = [emaopt.init(row[0], compensated=True) for row in x]
    starts = [emaopt.update(s, row[0], 0.5) for s, row in zip(starts, x, strict=True)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    run = functools.partial(emaopt.scan, method=method)
    alone = jax.jit(run)
    state, found = jax.jit(jax.vmap(run))(batch, x, decays)
    # Several smoothings of one sequence, and of several.
    same = jax.jit(jax.vmap(run, in_axes=(None, None, 0)))(starts[0], x[0], decays)[1]
    side = jax.jit(jax.vmap(run, in_axes=(None, 1, None), out_axes=(0, 1)))(
        emaopt.init(jnp.zeros(D)), np.swapaxes(x, 0, 1), decays[1]
    )[1]
    for k, decay in enumerate(decays):
        one, expected = alone(starts[k], x[k], decay)
        np.testing.assert_allclose(found[k], expected, rtol=0, atol=16 * ULP)
        np.testing.assert_allclose(state.m[k], one.m, rtol=0, atol=16 * ULP)
        np.testing.assert_allclose(state.weight[k], one.weight, rtol=4 * ULP)
        expected = alone(starts[0], x[0], decay)[1]
        np.testing.assert_allclose(same[k], expected, rtol=0, atol=16 * ULP)
        expected = averages(x[k], decays[1], method)
        np.testing.assert_allclose(side[:, k], expected, rtol=0, atol=16 * ULP)


@pytest.mark.parametrize("method", METHODS)
def test_a_scan_is_a_loop_of_updates(method, values):
    start = emaopt.init(values[0], compensated=True)

    def step(state, x):
        state = emaopt.update(state, x, 0.9)
        return state, emaopt.corrected(state)

    state, expected = jax.jit(lambda: jax.lax.scan(step, start, values))()
    final, found = jax.jit(lambda: emaopt.scan(start, values, 0.9, method=method))()
    np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND[method] * 2 * ULP)
    np.testing.assert_allclose(final.m, state.m, rtol=0, atol=BOUND[method] * ULP)
    assert final.count == state.count
    np.testing.assert_allclose(
        emaopt.corrected(final), expected[-1], rtol=0, atol=BOUND[method] * 2 * ULP
    )


# The blocked method.


@pytest.mark.parametrize("width", [3, 7, 40])
@pytest.mark.parametrize("steps", [5, 32, 75])
def test_blocks_of_any_length_and_width(width, steps, rng):
    x = rng.normal(size=(steps, width)).astype(np.float32)
    decay = np.float32(0.95)
    start = emaopt.init(x[0], compensated=True)
    start = emaopt.update(start, x[0], decay)
    longer = np.concatenate([x[:1], x])
    for reverse in (False, True) if steps == 75 else (False,):
        values = x[::-1] if reverse else x
        state, found = emaopt.scan(
            start, values, decay, method="blocked", reverse=reverse
        )
        found = found[::-1] if reverse else found
        expected, size = ema(longer, decay), ema(np.abs(longer), decay)
        error = np.abs(found - expected.corrected[1:]) / (ULP * size.corrected[1:])
        assert error.max() < 4
        np.testing.assert_allclose(state.m, expected.m[-1], rtol=0, atol=4 * ULP)
        assert state.count == steps + 1


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "reverse"), [(-np.inf, False), (np.nan, True)])
def test_blocks_do_not_reach_back(bad, reverse, rng):
    x = rng.normal(size=(70, 2)).astype(np.float32)
    x[40, 1] = bad
    start = emaopt.init(x[0])
    run = jax.jit(functools.partial(emaopt.scan, method="blocked", reverse=reverse))
    found = np.asarray(run(start, x, np.float32(0.9))[1])
    clean = np.asarray(run(start, np.nan_to_num(x), np.float32(0.9))[1])
    before, after = slice(None, 40), slice(40, None)
    if reverse:
        before, after = slice(41, None), slice(None, 41)
    np.testing.assert_allclose(found[before], clean[before], rtol=0, atol=8 * ULP)
    np.testing.assert_allclose(found[:, 0], clean[:, 0], rtol=0, atol=8 * ULP)
    assert not np.isfinite(found[after, 1]).any()
    # Also where a batch hides the branch, and for values beyond the accumulator.
    both = jax.vmap(lambda x: run(start, x, np.float32(0.9))[1])
    np.testing.assert_allclose(
        both(np.stack([x, np.nan_to_num(x)]))[1],
        both(np.stack([np.nan_to_num(x)] * 2))[0],
        rtol=8 * ULP,
        atol=8 * ULP,
    )


# The choice.


@pytest.mark.parametrize(
    ("shapes", "changes", "chosen"),
    [
        ([(30_000,)], {}, "blocked"),
        ([(30_000, 8)], {}, "blocked"),
        ([(30_000, 9)], {}, "scan"),
        ([(100_000, 2), (100_000, 2, 4)], {}, "blocked"),
        ([(100_000, 2), (100_000, 3, 3)], {}, "scan"),
        ([(29_999,)], {}, "scan"),
        ([(100_000,)], {"dtype": jnp.bfloat16}, "blocked"),
        ([(100_000,)], {"dtype": jnp.complex64}, "scan"),
        ([(100_000,)], {"decay": jax.ShapeDtypeStruct((), np.float32)}, "blocked"),
        ([(100_000,)], {"decay": jax.ShapeDtypeStruct((100_000,), np.float32)}, "scan"),
        ([(100_000,)], {"observed": np.ones(100_000, bool)}, "scan"),
        ([(100_000,)], {"reset": np.ones(100_000, bool)}, "scan"),
        ([(100_000,)], {"reverse": True}, "blocked"),
        ([(100_000,)], {"method": "scan"}, "scan"),
        ([(40,)], {"method": "blocked"}, "blocked"),
    ],
)
def test_auto_chooses_by_static_facts(shapes, changes, chosen):
    options = {"decay": jax.ShapeDtypeStruct((), np.float32), **changes}
    dtype = options.pop("dtype", np.float32)
    values = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    state = emaopt.init([jax.ShapeDtypeStruct(s[1:], dtype) for s in shapes])
    decay = options.pop("decay")
    traced = jax.make_jaxpr(
        lambda state, values, decay: emaopt.scan(state, values, decay, **options)
    )(state, values, decay)
    assert ("dot_general" in str(traced)) == (chosen == "blocked")
