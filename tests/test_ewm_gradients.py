"""Derivatives of the window of dataframes against finite differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import emaopt

X = np.array([np.nan, 0.7, -1.2, np.inf, np.nan, 2.5, 0.4, -0.3])
Y = np.array([0.2, 1.1, 0.5, 0.1, -0.4, -1.5, np.nan, 0.9])
GAPS = np.array([0.0, 1.0, 0.4, 2.0, 0.7, 0.0, 1.3, 0.9])
STEPS = len(X)
PAIRED = ("cov", "corr")


def ours(name, weights, options, timed):
    """A scalar of one function's results, to differentiate."""

    def total(x, y, pace, times):
        arrays = (x, y) if name in PAIRED else (x,)
        how = {"times": times, "halflife": pace} if timed else {"decay": pace}
        out = getattr(emaopt, f"ewm_{name}")(*arrays, **how, **options)
        return jnp.sum(weights * jnp.where(jnp.isnan(out), 0, out))

    return total


def theirs(name, weights, options, timed):
    """The same by the weighted definition, in NumPy."""

    def total(x, y, pace, times):
        gaps = np.diff(times, prepend=times[0])
        decays = 0.5 ** (gaps / pace) if timed else np.full(STEPS, pace)
        rest = None if timed else 1 - pace
        out = oracles.ewm(name, x, y, decays, rest=rest, **options)[0]
        return np.sum(weights * np.nan_to_num(out))

    return total


def differences(function, arguments, one_sided=False, h=1e-6):
    """The derivative by each argument, or by each of its elements, in second order."""
    found = []
    for n, argument in enumerate(arguments):
        derivative = np.zeros(np.shape(argument))
        for index in np.ndindex(derivative.shape):
            step = np.zeros(derivative.shape)
            step[index] = h

            def at(k, n=n, argument=argument, step=step):
                moved = argument + k * step
                return function(*arguments[:n], moved, *arguments[n + 1 :])

            rise = (
                (4 * at(1) - at(2) - 3 * at(0)) if one_sided else at(1) - at(-1)
            ) / (2 * h)
            derivative[index] = rise
        found.append(derivative)
    return found


# Every option with each kind of weights; compiling a gradient takes seconds.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adjust", "ignore_na", "timed"),
    [
        ("mean", True, False, False),
        ("mean", False, False, False),
        ("mean", True, True, True),
        ("mean", False, False, True),
        ("var", False, True, False),
        ("std", True, False, False),
        ("std", False, False, False),
        ("std", True, False, True),
        ("std", False, True, True),
        ("cov", False, False, True),
        ("corr", True, True, False),
    ],
)
def test_gradients(rng, x64, name, adjust, ignore_na, timed):
    weights = rng.normal(size=STEPS)
    options = {"adjust": adjust, "ignore_na": ignore_na}
    if name == "var":
        options["bias"] = True
    arguments = (X, Y, 1.7 if timed else 0.6, np.cumsum(GAPS))
    found = jax.jit(jax.grad(ours(name, weights, options, timed), (0, 1, 2, 3)))(
        *arguments
    )
    expected = differences(theirs(name, weights, options, timed), arguments)
    # Steps of no length are at the edge of what is allowed: one-sided there.
    inside = np.diff(np.cumsum(GAPS), prepend=-1, append=99) > 0
    inside = inside[:-1] & inside[1:]
    for a, b, which in zip(found, expected, (..., ..., ..., inside), strict=True):
        np.testing.assert_allclose(a[which], b[which], rtol=1e-6, atol=1e-7)
    assert found[2] != 0
    if not timed:
        np.testing.assert_array_equal(found[3], 0)


@pytest.mark.parametrize(("name", "adjust"), [("mean", True), ("var", False)])
def test_gradients_at_decay_zero(rng, x64, name, adjust):
    """Nothing of the past is in the result, and its first trace in the derivative."""
    weights = rng.normal(size=STEPS)
    bias = {"bias": True} if name == "var" else {}
    for x in (X, np.nan_to_num(X, posinf=1.0)):
        options = {"adjust": adjust, **bias}
        found = jax.jit(jax.grad(ours(name, weights, options, False), (0, 2)))(
            x, Y, 0.0, np.cumsum(GAPS)
        )
        function = theirs(name, weights, options, False)
        (by_x,) = differences(lambda x: function(x, Y, 0.0, GAPS), (x,))  # noqa: B023
        (by_decay,) = differences(
            lambda b: function(x, Y, b, GAPS),  # noqa: B023
            (0.0,),
            one_sided=True,
        )
        np.testing.assert_allclose(found[0], by_x, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(found[1], by_decay, rtol=1e-5)


@pytest.mark.parametrize("name", ["mean", "std", "corr"])
def test_no_gradient_is_nan(name):
    """Nothing seen, one value, constants, decay 0, and all of it as float32."""
    gradient = jax.jit(jax.grad(ours(name, np.float32(1), {}, False), (0, 1, 2)))
    y = np.nan_to_num(Y).astype(np.float32)
    alone = np.where(np.arange(STEPS) == 3, 5, np.nan)
    for x in (np.full(STEPS, np.nan), alone, np.full(STEPS, 1e6), X):
        for decay in (0.0, 0.5, 1 - 2.0**-24):
            found = gradient(np.float32(x), y, np.float32(decay), None)
            assert all(np.isfinite(part).all() for part in found), (x, decay)


def test_the_gradient_of_std_at_zero_is_zero():
    """A subgradient there, as of every norm at 0."""
    gradient = jax.jit(jax.grad(lambda x: emaopt.ewm_std(x, 0.9)[1:].sum()))
    np.testing.assert_array_equal(gradient(np.full(5, 3, np.float32)), 0)


def test_forward_mode_is_reverse_mode(x64):
    total = ours("std", np.arange(1.0, STEPS + 1), {}, False)
    arguments = (X, Y, 0.6, None)
    forward = jax.jit(jax.jacfwd(total, (0, 1, 2)))(*arguments)
    reverse = jax.jit(jax.grad(total, (0, 1, 2)))(*arguments)
    for a, b in zip(forward, reverse, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
