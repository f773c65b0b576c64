"""Faults that users of averages have met elsewhere, and the right answers.

Each runs through the sequence function and through the state, fed step by step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracles import ULP

import emaopt


def by_ema_scan(values, decay, observed=None):
    assert observed is None
    return emaopt.ema_scan(values, decay)["corrected"]


def by_update(values, decay, observed=None, unobserved="hold", **options):
    values = jnp.asarray(values)
    state = emaopt.init(values[0], **options)
    out = []
    for k, x in enumerate(values):
        seen = True if observed is None else observed[k]
        state = emaopt.update(state, x, decay, observed=seen, unobserved=unobserved)
        out.append(emaopt.corrected(state, jnp.full_like(x, 0)))
    return jnp.stack(out)


def by_loop(values, decay, observed=None, unobserved="hold", **options):
    values = jnp.asarray(values)
    seen = np.ones(len(values), bool) if observed is None else observed

    @jax.jit
    def run(values, seen):
        def step(state, xs):
            x, s = xs
            state = emaopt.update(state, x, decay, observed=s, unobserved=unobserved)
            return state, emaopt.corrected(state, jnp.zeros_like(x))

        return lax.scan(step, emaopt.init(values[0], **options), (values, seen))[1]

    return run(values, seen)


def by_compensated(values, decay, observed=None):
    return by_loop(values, decay, observed, compensated=True)


FORMS = [by_ema_scan, by_update, by_loop, by_compensated]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
stateful = pytest.mark.parametrize("form", FORMS[1:], ids=lambda form: form.__name__)


@every_form
@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, np.float64])
@pytest.mark.parametrize("decay", [0.9999, 0.999999, 0.9999999])
def test_a_constant_stays_what_it_is(form, kind, decay):
    # 1 − b in double over 1 − bᵗ in float32 gives 0.987 at the first step.
    out = form(jnp.ones(3), kind(decay))
    np.testing.assert_allclose(out, 1, rtol=ULP)
    assert out[0] == 1


@every_form
def test_low_precision_does_not_stall(form):
    if form is by_update:
        return
    x = jnp.repeat(jnp.array([1, 0], jnp.bfloat16), 1000)
    exact = 0.999**1000 * (1 - 0.999**1000) / (1 - 0.999**2000)
    out = form(x, 0.999)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out[-1]), exact, rtol=2.0**-8)
    np.testing.assert_array_equal(out[:1000], np.ones(1000, jnp.bfloat16))
    wide = form(x.astype(jnp.float32), 0.999)
    np.testing.assert_allclose(wide[-1], 0.26884, atol=5e-6)


@stateful
@pytest.mark.parametrize("decay", [0.5, np.float32(0.5)])
def test_nan_does_not_poison_what_is_masked(form, decay):
    seen = np.array([True, False, True])
    out = form(jnp.array([1, np.nan, 3]), decay, seen)
    np.testing.assert_allclose(out, [1, 1, 7 / 3], rtol=ULP)
    state = emaopt.init(jnp.float32(0))
    for x, s in zip([1, np.nan, 3], seen, strict=True):
        state = emaopt.update(state, jnp.float32(x), decay, observed=s)
    assert (state.decay_power, state.count) == (0.25, 2)


def test_gradients_through_a_mask_are_right():
    seen = np.array([True, False, True])
    x = jnp.array([1, np.nan, 3])
    by_x, by_b = jax.grad(lambda x, b: by_loop(x, b, seen)[2], (0, 1))(
        x, jnp.float32(0.5)
    )
    np.testing.assert_allclose(by_x, [1 / 3, 0, 2 / 3], rtol=ULP)
    np.testing.assert_allclose(by_b, -8 / 9, rtol=4 * ULP)


def test_late_starters_have_counters_of_their_own():
    x = np.float32([[1, np.nan], [3, 5]])
    for decay in (0.5, np.float32(0.5)):
        out = by_loop(x, decay, ~np.isnan(x), per_element=True)
        np.testing.assert_allclose(out[-1], [7 / 3, 5], rtol=ULP)


@every_form
@pytest.mark.parametrize("kind", [float, np.float32])
def test_zero_times_infinity(form, kind):
    for bad in (np.inf, -np.inf, np.nan):
        x = np.float32([bad, 1, 2])
        np.testing.assert_array_equal(form(x, kind(0)), x)


@every_form
@pytest.mark.parametrize("kind", [float, np.float32])
def test_an_infinity_stays(form, kind):
    out = np.asarray(form(np.float32([1, np.inf, 1, 1]), kind(0.5)))
    assert out[0] == 1
    assert out[1] == np.inf
    assert not np.isfinite(out[1:]).any()


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint16])
def test_integers_are_not_truncated(dtype):
    x = jnp.array([1, 2, 3, 4], dtype)
    exact = [1, 5 / 3, 17 / 7, 49 / 15]
    out = by_ema_scan(x, 0.5)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, exact, rtol=2 * ULP)
    state = emaopt.init(x[0])
    for value, average in zip(x, exact, strict=True):
        state = emaopt.update(state, value, 0.5)
        np.testing.assert_allclose(emaopt.corrected(state), average, rtol=2 * ULP)


@every_form
@pytest.mark.parametrize("value", [65504, 1e-6, 6e-8])
def test_the_range_of_float16(form, value):
    out = form(np.full(20, value, np.float16), 0.999)
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, np.float16(value))


@every_form
@pytest.mark.parametrize("value", [3e38, -3e38, 1e-37])
def test_the_range_of_float32(form, value):
    out = form(np.full(20, value, np.float32), 0.5)
    np.testing.assert_allclose(out, np.float32(value), rtol=2 * ULP)


@every_form
@pytest.mark.parametrize("decay", [0.5, np.float32(0.5)])
def test_imaginary_parts_are_kept(form, decay):
    out = form(np.complex64([1 + 2j, 3 - 1j]), decay)
    assert out.dtype == np.complex64
    np.testing.assert_allclose(out, [1 + 2j, 7 / 3], rtol=0, atol=2 * ULP)


@stateful
def test_a_schedule_is_corrected_by_its_product(form):
    decays = jnp.array([0, 0.5, 2 / 3])
    out = form(jnp.float32([1, 2, 6]), lambda count: decays[count])
    np.testing.assert_allclose(out, [1, 1.5, 3], rtol=2 * ULP)
    # Zero for five steps, then 0.99: a correction by today's decay gives 17.
    out = form(jnp.ones(8), lambda count: jnp.where(count < 5, 0, 0.99))
    np.testing.assert_allclose(out, 1, rtol=ULP)


def test_a_start_that_is_not_zero_is_not_corrected_away():
    for decay in (0.9, np.float32(0.9)):
        for options in ({}, {"compensated": True}):
            state = emaopt.init(jnp.float32(4), warm_start=True, **options)
            for _ in range(5):
                np.testing.assert_allclose(emaopt.corrected(state), 4, rtol=ULP)
                state = emaopt.update(state, jnp.float32(4), decay)
    np.testing.assert_allclose(by_update(np.full(5, 4.0, np.float32), 0.9), 4, rtol=ULP)


@pytest.mark.parametrize("compensated", [False, True])
def test_a_stream_in_two_parts_is_the_stream(compensated, rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    step = jax.jit(emaopt.update)
    whole = emaopt.init(x[0], compensated=compensated)
    for row in x:
        whole = step(whole, row, 0.5)
    state = emaopt.init(x[0], compensated=compensated)
    for row in x[:2]:
        state = step(state, row, 0.5)
    state = jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), state)
    for row in x[2:]:
        state = step(state, row, 0.5)
    for a, b in zip(*map(jax.tree.leaves, (state, whole)), strict=True):
        np.testing.assert_array_equal(a, b)


@stateful
def test_gaps(form):
    x, seen = np.float32([1, np.nan, 3]), np.array([True, False, True])
    if form is not by_compensated:
        out = form(x, 0.6, seen, "decay")
        np.testing.assert_allclose(out[-1], 2.470588, atol=1e-6)
    np.testing.assert_allclose(form(x, 0.6, seen)[-1], 2.25, rtol=2 * ULP)
    x, seen = np.float32([np.nan, np.nan, 2, 4]), np.array([False, False, True, True])
    out = form(x, 0.5, seen)
    np.testing.assert_allclose(out, [0, 0, 2, 10 / 3], rtol=2 * ULP)
    state = emaopt.update(emaopt.init(x[0]), x[0], 0.5, observed=False)
    assert np.isnan(emaopt.corrected(state))


def test_float64_is_not_promoted_to(x64):
    x = jnp.ones(3, jnp.float32)
    for decay in (np.float64(0.9), 0.9, jnp.float64(0.9)):
        for form in FORMS:
            out = form(x, decay)
            assert out.dtype == np.float32
            np.testing.assert_allclose(out, 1, rtol=ULP)


def test_a_schedule_that_returns_1():
    decays = jnp.array([1, 0.5])
    state = emaopt.init(jnp.float32(4))
    params = jnp.float32(9)
    state = emaopt.update(state, jnp.float32(4), lambda count: decays[count])
    assert emaopt.corrected(state, params) == params
    state = emaopt.update(state, jnp.float32(4), lambda count: decays[count])
    assert emaopt.corrected(state, params) == 4
    assert state.count == 2
    # Nor does it let an infinity in.
    for one in (1.0, jnp.float32(1)):
        after = emaopt.update(state, jnp.float32(np.inf), lambda count, one=one: one)
        np.testing.assert_array_equal(emaopt.corrected(after), 4)
