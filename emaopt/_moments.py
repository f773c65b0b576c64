"""Moments whose weights fade, in one loop: means, covariances, and 1 − Σ v²."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from emaopt import _arithmetic, _checks, _decay, _methods, _scan, _state


class Clock(NamedTuple):
    """What the steps do to the weights; leading axis T."""

    decay: jax.Array
    rest: jax.Array  # what one float of the decay leaves over
    alpha: jax.Array | None  # 1 − β of a decay; None for times


# Compiled here, lest each call outside of jit compiles its loop anew.
@partial(jax.jit, static_argnames=("known", "adjust", "ignore_na"))
def mean(
    x: jax.Array,
    seen: jax.Array,
    clock: Clock,
    decay: Any,
    *,
    known: float | None,
    adjust: bool,
    ignore_na: bool,
) -> jax.Array:
    """The mean for one decay: where nothing is missing, a scan of the core's."""

    def complete() -> jax.Array:
        start = _state.init(x[0], compensated=True, warm_start=not adjust)
        return _scan.scan(start, x, decay if known is None else known)[1]

    def broken() -> jax.Array:
        options = {"adjust": adjust, "ignore_na": ignore_na}
        return relative([x], seen, clock, pairs=None, bias=True, **options)[0]

    return lax.cond(jnp.all(seen), complete, broken)


def clock(decay: Any, times: Any, halflife: Any, steps: int, dtype: Any) -> Clock:
    """The decays of all steps, each as two floats."""
    if times is None:
        rate = _decay.resolve(decay, None)
        if rate.static:
            decay, alpha = dtype.type(rate.decay), dtype.type(rate.alpha)
            rest = dtype.type(rate.decay - float(decay))
        else:
            whole = rate.decay.astype(_checks.wide_dtype(dtype, rate.decay.dtype))
            decay, alpha = whole.astype(dtype), (1 - whole).astype(dtype)
            rest = (whole - decay.astype(whole.dtype)).astype(dtype)
    else:
        decay, rest = _faded(_elapsed(times, halflife, steps, dtype), dtype)
        alpha = None
    parts = Clock(decay, rest, alpha)
    return jax.tree.map(lambda part: jnp.broadcast_to(part, (steps,)), parts)


def _elapsed(times: Any, halflife: Any, steps: int, dtype: Any) -> Any:
    """The time since the step before, in half-lives; 0 at the first.

    In double, by NumPy, where both are known; else in ``dtype``.
    """
    times, halflife = _checks.times(times, halflife, steps)
    known = isinstance(times, np.ndarray)
    passed = np.diff(times) if known else jnp.diff(times).astype(dtype)
    if known and not isinstance(halflife, jax.Array):
        return np.concatenate([np.zeros(min(steps, 1)), passed / halflife])
    passed = jnp.asarray(passed.astype(dtype)) / jnp.asarray(halflife, dtype)
    return jnp.concatenate([jnp.zeros(min(steps, 1), dtype), passed])


def _faded(halflives: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The decays over ``halflives``, each as two floats."""
    xp = np if isinstance(halflives, np.ndarray) else jnp
    # Near 1 the decay is what is gone from 1; far from it, it has its own digits.
    gone = -xp.expm1(-np.log(2).astype(halflives.dtype) * halflives)
    whole = xp.exp2(-halflives)
    short = halflives < 1
    decay = xp.where(short, 1 - gone, whole).astype(dtype)
    wide = decay.astype(halflives.dtype)
    rest = xp.where(short, (1 - wide) - gone, whole - wide).astype(dtype)
    return jnp.asarray(decay), lax.stop_gradient(jnp.asarray(rest))


@partial(jax.jit, static_argnames=("adjust", "ignore_na", "pairs", "bias"))
def relative(
    xs: Sequence[jax.Array],
    seen: jax.Array,
    clock: Clock,
    *,
    adjust: bool,
    ignore_na: bool,
    pairs: tuple[tuple[int, int], ...] | None,
    bias: bool,
) -> list[jax.Array]:
    """Averages whose decay at a step is the share that the past has behind it.

    share = W⁻ / (W⁻ + n) with W⁻ what is left of the weight of the past, and n that
    of the value: 1 if adjusted, and else 1 − β, or what W⁻ leaves of 1. The average of
    (x_i − y_i)(x_j − y_j), one factor before the step and one behind it, is the
    covariance (West, 1979). Σ v² falls by share² a step and gains (1 − share)²; the
    average of 2·share / (1 + share) with the decay share² is 1 − Σ v², with no
    cancellation. Deviations are from means that are kept as two floats.
    """
    # The sum over at most one step: zeros in the shape and the sharding of a step.
    row = jnp.sum(jnp.zeros_like(xs[0][:1]), 0)
    zero = jnp.real(row)
    one = zero + 1
    averages = [(row, row)] * len(xs if pairs is None else pairs) + [(zero, zero)]
    independent = [] if bias else [(zero, zero)] * 2

    def step(carry: Any, inputs: Any) -> tuple[Any, list[jax.Array]]:
        weight, averages, independent, means = carry
        xs, seen, clock = inputs
        added = seen.astype(one.dtype) if adjust else zero
        now, left = _arithmetic.scaled_sum(
            clock.decay, clock.rest, *weight, added, None
        )
        if adjust:
            old, new = (now - 1) + left, one
            weight = now, left
        else:
            old = now
            new = (1 - old) - left if clock.alpha is None else zero + clock.alpha
            weight = _choose(seen, (one, zero), (now, left))
        if ignore_na:
            weight = _choose(seen, weight, carry[0])
        old, new = jnp.where(seen, old, 0), jnp.where(seen, new, 1)
        rate = _decay.Rate(old / (old + new), new / (old + new))
        if pairs is None:
            values = xs
        else:
            shifts = [(x - m) - r for x, (m, r) in zip(xs, means, strict=True)]
            values = [(rate.decay * shifts[i]) * shifts[j] for i, j in pairs]
            # From the end that is nearer: a step past all weight leaves nothing behind.
            near = rate.decay < 0.5
            moved = [
                _moved(
                    jnp.where(near, x, m),
                    jnp.where(near, -rate.decay * shift, r + rate.alpha * shift),
                )
                for x, (m, r), shift in zip(xs, means, shifts, strict=True)
            ]
            means = _choose(seen, moved, means)
        averages = _advance(averages, [*values, one], rate, seen)
        if not bias:
            squared = _decay.Rate(rate.decay**2, rate.alpha * (1 + rate.decay))
            value = 2 * rate.decay / (1 + rate.decay)
            independent = _advance(independent, [value, one], squared, seen)
        out = [*_corrected(averages), *_corrected(independent)]
        return (weight, averages, independent, means), out

    means = [] if pairs is None else [(zero, zero) for _ in xs]
    carry = (zero, zero), averages, independent, means
    inputs = xs, seen, clock
    carry = _methods.vary_over(carry, _methods.axes_of(inputs))
    return lax.scan(step, carry, inputs)[1]


def _advance(
    averages: list[tuple[Any, Any]], values: list[jax.Array], rate: Any, seen: jax.Array
) -> list[tuple[Any, Any]]:
    """A step of averages that are two floats each, at one rate, where ``seen``."""
    rate = _decay.prepared(rate, [rate.decay.dtype])
    moved = []
    for (m, r), x in zip(averages, values, strict=True):
        xs = [_arithmetic.where(seen, x, 0)]
        # One by one: `recur` has the large ones of a call wait for each other.
        (new,), (left,) = _arithmetic.recur([rate], [0], [m], [r], xs, None)
        moved.append((new, left))
    return _choose(seen, moved, averages)


def _corrected(averages: list[tuple[Any, Any]]) -> list[jax.Array]:
    """The averages but the last, over the last, which is that of 1."""
    return [
        _arithmetic.mean(m, r, *averages[-1], empty=jnp.nan) for m, r in averages[:-1]
    ]


def _moved(mean: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean moved, and what rounding left behind."""
    moved = mean + by
    return moved, by - (moved - mean)


def _choose(condition: jax.Array, chosen: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)
