"""Derivatives along time against finite differences of the recurrence in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import lax
from oracles import ULP

import emaopt

T, D = 5, 2
SLOW = [
    pytest.param(form, marks=pytest.mark.slow) for form in ("associative", "blocked")
]
MASKABLE = ("scan", SLOW[0], "update")
STEPS = {"blocked": 40}  # a block of 32 and some more
SEEN = np.array([True, False, True, False, True])
RESET = np.arange(T) == 3
BAD = np.broadcast_to([np.nan, np.inf], (T, D))
# In a step of H rounding errs by 1e-16 / H, and the series by H².
H = 1e-5
NEAR = {"rtol": 1e-7, "atol": 1e-7}


class Point(NamedTuple):
    """Where to differentiate: the values, the decays and the state before them."""

    values: np.ndarray
    decay: np.ndarray
    m: np.ndarray
    weight: np.ndarray
    decay_power: np.ndarray


def point(rng, form="scan", decay=None, fine=False):
    steps, shape = STEPS.get(form, T), (D,) if fine else ()
    if decay is None:
        decay = rng.uniform(0.2, 0.95, (steps, *shape))
        decay[2] = 0
    return Point(
        values=rng.normal(size=(steps, D)) + 1,
        decay=np.asarray(decay, np.float64),
        m=rng.normal(size=D),
        weight=rng.uniform(0.3, 0.9, shape),
        decay_power=rng.uniform(0.3, 0.9, shape),
    )


def sides_of(at, rng):
    """What to multiply every average by, and the three parts of the final state."""
    return rng.normal(size=(len(at.values) + 3, D))


def run(form, state, values, decay, seen=None, reset=None, **options):
    """``scan`` by a method, ``ema_scan``, or a loop of ``update`` and ``corrected``."""
    if form == "ema_scan":
        return state, emaopt.ema_scan(values, decay)["corrected"]
    if form != "update":
        masks = {"observed": seen, "reset": reset}
        return emaopt.scan(state, values, decay, method=form, **masks, **options)
    reverse = options.pop("reverse", False)

    def step(state, now):
        x, b, observed = now
        state = emaopt.update(state, x, b, observed=observed, **options)
        return state, emaopt.corrected(state)

    steps = len(values)
    decays = decay if jnp.ndim(decay) else jnp.full(steps, decay)
    seen = jnp.ones(steps, bool) if seen is None else seen
    return lax.scan(step, state, (values, decays, seen), reverse=reverse)


def total(at, sides, seen=None, reset=None, *, form, **options):
    """A number made of every average and of the final state."""
    fine = jnp.ndim(at.weight) > 0
    state = emaopt.init(at.m, compensated=form != "update", per_element=fine)
    state = state._replace(m=at.m, weight=at.weight, decay_power=at.decay_power)
    state, averages = run(form, state, at.values, at.decay, seen, reset, **options)
    averages = jnp.where(jnp.isnan(averages), 0, averages)
    final = state.m, state.weight, state.decay_power
    final = jnp.stack([jnp.broadcast_to(part, D) for part in final])
    return jnp.sum(sides * jnp.concatenate([averages, final]))


def reference(at, sides, seen=True, reset=False, *, reverse=False, **options):
    """The same in NumPy, the state before being one more value."""
    weight = np.broadcast_to(at.weight, D)

    def in_order(first, steps):
        steps = np.asarray(steps)
        steps = steps.reshape(steps.shape + (1,) * (2 - steps.ndim))
        steps = np.broadcast_to(steps, at.values.shape)
        return np.concatenate([[first], steps[::-1] if reverse else steps])

    out = oracles.ema(
        in_order(at.m / weight, at.values),
        in_order(1 - weight, at.decay),
        in_order([True] * D, seen),
        reset=in_order([False] * D, reset),
        **options,
    )
    averages = np.nan_to_num(out.corrected[1:])
    power = out.decay_power[-1] * (at.decay_power / (1 - weight))
    final = out.m[-1], out.weight[-1], power
    return np.sum(sides * [*averages[:: -1 if reverse else 1], *final])


def slope(function, one_sided):
    """Of a function of a step at 0, to second order."""
    if one_sided:
        return (4 * function(H) - function(2 * H) - 3 * function(0)) / (2 * H)
    return (function(H) - function(-H)) / (2 * H)


def slopes(function, at):
    """By every element of a ``Point``; one-sided where a decay is 0."""
    found = {}
    for name, part in at._asdict().items():
        found[name] = np.empty(part.shape)
        for index in np.ndindex(part.shape):
            unit = np.zeros(part.shape)
            unit[index] = 1

            def moved(step, name=name, part=part, unit=unit):
                return function(at._replace(**{name: part + step * unit}))

            at_zero = name == "decay" and part[index] == 0
            found[name][index] = slope(moved, one_sided=at_zero)
    return Point(**found)


gradient = jax.jit(jax.grad(total), static_argnames=("form", "unobserved", "reverse"))


def assert_slopes(at, sides, seen=None, reset=None, *, form, **options):
    found = gradient(at, sides, seen, reset, form=form, **options)
    masks = {"seen": seen, "reset": reset}
    masks = {name: mask for name, mask in masks.items() if mask is not None}
    expected = slopes(lambda at: reference(at, sides, **masks, **options), at)
    for name, a, b in zip(at._fields, found, expected, strict=True):
        np.testing.assert_allclose(a, b, **NEAR, err_msg=name)


@pytest.mark.parametrize("form", MASKABLE)
@pytest.mark.parametrize("unobserved", ["hold", "decay"])
@pytest.mark.parametrize("fine", [False, True], ids=["by step", "by element"])
def test_masks_and_resets(form, unobserved, fine, x64, rng):
    at = point(rng, fine=fine)
    seen = np.stack([SEEN, SEEN ^ (np.arange(T) != 2)], 1) if fine else SEEN
    at.values[~seen] = BAD[~seen]
    options = {"unobserved": unobserved, "reverse": fine != (unobserved == "decay")}
    for reset in (None,) if form == "update" else (RESET, np.zeros(T, bool)):
        assert_slopes(at, sides_of(at, rng), seen, reset, form=form, **options)


@pytest.mark.parametrize(
    ("form", "reverse"),
    [("scan", False), pytest.param("associative", True, marks=SLOW[0].marks)],
)
def test_resets_alone(form, reverse, x64, rng):
    at = point(rng)
    assert_slopes(at, sides_of(at, rng), None, RESET, form=form, reverse=reverse)


@pytest.mark.parametrize("form", ["scan", "update", *SLOW])
def test_one_decay_for_all_steps(form, x64, rng):
    for decay in (0.0, 0.6, 0.99):
        at = point(rng, form, decay)
        assert_slopes(at, sides_of(at, rng), form=form, reverse=form == "blocked")


@pytest.mark.parametrize(
    ("form", "decay"),
    [("scan", 0.0), ("scan", 0.6), ("associative", 0.6), ("blocked", 0.6)],
)
def test_decays_known_while_tracing(form, decay, x64, rng):
    at = point(rng, form, decay)
    sides = sides_of(at, rng)

    def known(values, m):
        return total(at._replace(values=values, m=m, decay=decay), sides, form=form)

    found = jax.jit(jax.grad(known, (0, 1)))(at.values, at.m)
    expected = slopes(lambda at: reference(at, sides), at)
    np.testing.assert_allclose(found[0], expected.values, **NEAR)
    np.testing.assert_allclose(found[1], expected.m, **NEAR)


@pytest.mark.parametrize(
    ("form", "unobserved"),
    [("scan", "hold"), ("scan", "decay"), ("associative", "decay"), ("update", "hold")],
)
def test_a_gap_at_decay_zero(form, unobserved, x64, rng):
    sides, x = rng.normal(size=(2, T))
    x = np.where(SEEN, x, np.nan)

    def ours(b):
        state = emaopt.init(jnp.float64(0))
        return jnp.sum(sides * run(form, state, x, b, SEEN, unobserved=unobserved)[1])

    def theirs(b):
        rows = oracles.window(SEEN, np.full(T, b), ignore_na=unobserved == "hold")
        return np.sum(sides * (rows @ np.nan_to_num(x)))

    found = jax.jit(jax.grad(ours))(0.0)
    np.testing.assert_allclose(found, slope(theirs, one_sided=True), **NEAR)


@pytest.mark.parametrize("form", MASKABLE)
def test_gaps_by_hand(form):
    """(β·x₁ + x₃) / (1 + β), and (β²·m + (1 − β)·x) / (β²·w + (1 − β)) at m = w = 0."""
    x = np.float32([1, np.nan, 3])

    def held(x, decay):
        state = emaopt.init(x[0], compensated=True)
        return run(form, state, x, decay, ~np.isnan([1, np.nan, 3]))[1][2]

    by_x, by_decay = jax.jit(jax.grad(held, (0, 1)))(x, np.float32(0.5))
    np.testing.assert_allclose(by_x, [1 / 3, 0, 2 / 3], rtol=4 * ULP)
    np.testing.assert_allclose(by_decay, -8 / 9, rtol=4 * ULP)

    def faded(m, weight, decay):
        state = emaopt.init(m, compensated=True)._replace(m=m, weight=weight)
        seen = np.array([False, True])
        return run(form, state, x[1:], decay, seen, unobserved="decay")[1][1]

    by_state = jax.jit(jax.grad(faded, (0, 1)))(*np.float32([0, 0, 0.5]))
    np.testing.assert_allclose(by_state, (0.5, -1.5), rtol=4 * ULP)


@pytest.mark.parametrize("form", MASKABLE)
@pytest.mark.parametrize("unobserved", ["hold", "decay"])
def test_no_gradient_is_nan(form, unobserved):
    def summed(values, decay, m, seen):
        state = emaopt.init(m, compensated=True)._replace(m=m)
        averages = run(form, state, values, decay, seen, unobserved=unobserved)[1]
        return jnp.sum(averages), averages

    gradient = jax.jit(jax.grad(summed, (0, 1, 2), has_aux=True))
    for decay in np.float32([0, 0.5, 1 - 2.0**-24]):
        for seen in (np.zeros(T, bool), SEEN, ~SEEN):
            values = np.where(seen[:, None], 1e6, BAD).astype(np.float32)
            decays, start = np.full(T, decay), np.zeros(D, np.float32)
            found, averages = gradient(values, decays, start, seen)
            assert np.isnan(averages).all(1).sum() == np.argmax([*seen, True])
            assert all(np.isfinite(part).all() for part in found), (decay, seen)
            np.testing.assert_array_equal(found[0][~seen], 0)


def curve(form, rng, decay):
    """A number as a function of the decay, by us and in NumPy."""
    at, reset = point(rng, form, decay), False
    sides = sides_of(at, rng)
    if form == "ema_scan":  # begins with nothing, as after a reset
        sides[-3:], reset = 0, np.arange(T) == 0
    return (
        lambda b: total(at._replace(decay=b), sides, form=form),
        lambda b: reference(at._replace(decay=b), sides, reset=reset),
    )


@pytest.mark.parametrize("form", ["scan", "update", "ema_scan", *SLOW])
def test_many_decays_at_once(form, x64, rng):
    ours, theirs = curve(form, rng, 0.0)
    decays = np.array([0, 0.5, 0.9, 0.999])
    found = jax.jit(jax.vmap(jax.grad(ours)))(decays)
    for decay, by_decay in zip(decays, found, strict=True):
        expected = slope(lambda step: theirs(decay + step), decay == 0)  # noqa: B023
        np.testing.assert_allclose(by_decay, expected, **NEAR)


@pytest.mark.parametrize("form", ["scan", "update", "ema_scan", *SLOW])
def test_the_second_derivative(form, x64, rng):
    ours, theirs = curve(form, rng, 0.6)
    found = jax.jit(jax.grad(jax.grad(ours)))(0.6)
    h = 1e-4  # rounding errs by 1e-15 / h² = 1e-7, the series by h² = 1e-8
    expected = (theirs(0.6 + h) - 2 * theirs(0.6) + theirs(0.6 - h)) / h**2
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["scan", *SLOW])
def test_forward_mode_is_reverse_mode(form, x64, rng):
    at, masks, options = point(rng), (SEEN, RESET), {"unobserved": "decay"}
    at.values[~SEEN] = BAD[~SEEN]
    if form == "blocked":
        at, masks, options = point(rng, form, 0.6), (None, None), {}
    sides, options = sides_of(at, rng), {"form": form, "reverse": True, **options}
    along = Point(*(rng.normal(size=part.shape) for part in at))

    def one(at):
        return total(at, sides, *masks, **options)

    forward = jax.jit(lambda at: jax.jvp(one, (at,), (along,))[1])(at)
    reverse = gradient(at, sides, *masks, **options)
    products = jax.tree.map(lambda a, b: np.sum(a * b), reverse, along)
    np.testing.assert_allclose(forward, sum(products), rtol=1e-12)
