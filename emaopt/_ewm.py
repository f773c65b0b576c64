"""The exponentially weighted window of dataframes (pandas, Polars), over arrays."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from emaopt import _checks, _decay, _scan, _state


class _Window(NamedTuple):
    """The options that all five functions share, as the user gave them."""

    decay: Any
    axis: Any
    adjust: Any
    ignore_na: Any
    min_periods: Any
    times: Any
    halflife: Any


def ewm_mean(
    values: Any,
    decay: Any = None,
    *,
    axis: int = 0,
    adjust: bool = True,
    ignore_na: bool = False,
    min_periods: Any = 0,
    times: Any = None,
    halflife: Any = None,
) -> jax.Array:
    """The exponentially weighted mean at every step.

    y_t = Σ ω_i x_i / Σ ω_i with ω_i = β^(t − i), or 0.5^((time_t − time_i) / halflife)

    Args:
      values: x, an array of numbers of rank >= 1. NaN and infinities are missing, as
        in pandas: not read, and the last result is repeated there.
      decay: β, a scalar in [0, 1), which may be traced; see ``decay_from_alpha``,
        ``decay_from_com``, ``decay_from_span`` and ``decay_from_halflife``. Either a
        decay, or ``times`` with ``halflife``.
      axis: the axis of ``values`` that is time.
      adjust: True: the weights above. False: the recurrence y_t = β·y_{t-1} +
        (1 − β)·x_t from y_0 = x_0; with ``times``, β is that of the time passed.
      ignore_na: whether a missing value leaves the weights as they are; else time
        passes there too. Without ``adjust`` the weights then are β^(k + 1) and 1 − β
        at the first value after k missing ones, divided by their sum.
      min_periods: NaN where fewer values have been seen, or none at all.
      times: shape (T,), the times of the values, not decreasing: numbers, or NumPy
        ``datetime64``, whose differences are then taken exactly and in double, as are
        those of NumPy numbers.
      halflife: the time in which a weight halves: a positive number in the unit of
        ``times``; for ``datetime64`` a ``numpy.timedelta64`` or a
        ``datetime.timedelta``.

    Returns:
      The means, in the shape of ``values`` and in their dtype (float32 for integers
      and bools).

    Raises:
      AssertionError: ``values`` has rank 0 or is no numbers.
      ValueError: no or several parameterisations; a decay, half-life, axis or
        ``min_periods`` out of range; times that are too few, not finite or decreasing.
      TypeError: an option of the wrong type.

    The results are those of ``pandas.DataFrame.ewm(...).mean()``, but for one case, in
    which pandas 3.1 takes another recurrence than beside it: alpha exactly ½ without
    ``adjust``, at a value behind a missing one.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import emaopt
    >>> x = jnp.array([1.0, jnp.nan, 3.0])
    >>> print(emaopt.ewm_mean(x, emaopt.decay_from_com(1)))
    [1.  1.  2.6]
    >>> options = ("axis", "adjust", "ignore_na", "min_periods")
    >>> jitted = jax.jit(emaopt.ewm_mean, static_argnames=options)
    >>> print(jitted(x, 0.5, ignore_na=True, min_periods=2))
    [      nan       nan 2.3333333]
    """
    window = _Window(decay, axis, adjust, ignore_na, min_periods, times, halflife)
    return _run(window, {"values": values}, None)[0]


def ewm_var(
    values: Any,
    decay: Any = None,
    *,
    bias: bool = False,
    axis: int = 0,
    adjust: bool = True,
    ignore_na: bool = False,
    min_periods: Any = 0,
    times: Any = None,
    halflife: Any = None,
) -> jax.Array:
    """The exponentially weighted variance at every step.

    Σ v_i (x_i − y)² / (1 − Σ v_i²), v_i = ω_i / Σ ω_j, y the mean, ω as in ``ewm_mean``

    Args:
      values: x, an array of real numbers of rank >= 1; NaN and infinities are missing.
      decay: β, a scalar in [0, 1), which may be traced.
      bias: whether to leave out the denominator, which makes the variance of
        independent values unbiased; without ``bias`` that of a single value is NaN.
      axis: the axis of ``values`` that is time.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: NaN where fewer values have been seen, or none at all.
      times: as in ``ewm_mean``.
      halflife: as in ``ewm_mean``.

    Returns:
      The variances, in the shape and dtype of ``values`` (float32 for integers).

    Raises:
      AssertionError: ``values`` has rank 0 or is no numbers.
      ValueError: as ``ewm_mean``.
      TypeError: as ``ewm_mean``, or complex ``values``.

    The results are those of ``pandas.DataFrame.ewm(...).var()``, which takes no times.
    In one pass, from deviations and never from squares of the values, so that a small
    spread around a large mean keeps its digits: the update of West (1979).

    >>> import jax.numpy as jnp
    >>> import emaopt
    >>> print(emaopt.ewm_var(jnp.array([1e6, 1e6 + 1, 1e6 + 3]), 0.5))
    [      nan 0.5       2.4285715]
    """
    window = _Window(decay, axis, adjust, ignore_na, min_periods, times, halflife)
    return _run(window, {"values": values}, ((0, 0),), bias=bias)[0]


def ewm_std(
    values: Any,
    decay: Any = None,
    *,
    bias: bool = False,
    axis: int = 0,
    adjust: bool = True,
    ignore_na: bool = False,
    min_periods: Any = 0,
    times: Any = None,
    halflife: Any = None,
) -> jax.Array:
    """The exponentially weighted standard deviation at every step.

    The square root of ``ewm_var``

    Args:
      values: x, an array of real numbers of rank >= 1; NaN and infinities are missing.
      decay: β, a scalar in [0, 1), which may be traced.
      bias: as in ``ewm_var``.
      axis: the axis of ``values`` that is time.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: NaN where fewer values have been seen, or none at all.
      times: as in ``ewm_mean``.
      halflife: as in ``ewm_mean``.

    Returns:
      The standard deviations, in the shape and dtype of ``values`` (float32 for
      integers). Where one is 0 its derivative is taken as 0, which is a subgradient
      with respect to the values, as that of a norm at 0.

    Raises:
      AssertionError: ``values`` has rank 0 or is no numbers.
      ValueError: as ``ewm_mean``.
      TypeError: as ``ewm_mean``, or complex ``values``.

    The results are those of ``pandas.DataFrame.ewm(...).std()``, which takes no times.

    >>> import jax.numpy as jnp
    >>> import emaopt
    >>> print(emaopt.ewm_std(jnp.array([1.0, 3.0, 3.0]), 0.5, bias=True))
    [0.        0.9428091 0.6998542]
    """
    window = _Window(decay, axis, adjust, ignore_na, min_periods, times, halflife)
    return _root(_run(window, {"values": values}, ((0, 0),), bias=bias)[0])


def ewm_cov(
    x: Any,
    y: Any,
    decay: Any = None,
    *,
    bias: bool = False,
    axis: int = 0,
    adjust: bool = True,
    ignore_na: bool = False,
    min_periods: Any = 0,
    times: Any = None,
    halflife: Any = None,
) -> jax.Array:
    """The exponentially weighted covariance of two arrays, element by element.

    Σ v_i (x_i − x̂)(y_i − ŷ) / (1 − Σ v_i²), the v_i and the means as in ``ewm_var``

    Args:
      x: an array of real numbers of rank >= 1; NaN and infinities are missing.
      y: an array of the shape of ``x``. Where either is missing, both are.
      decay: β, a scalar in [0, 1), which may be traced.
      bias: as in ``ewm_var``.
      axis: the axis of ``x`` and ``y`` that is time.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: NaN where fewer pairs have been seen, or none at all.
      times: as in ``ewm_mean``.
      halflife: as in ``ewm_mean``.

    Returns:
      The covariances, in the shape of ``x`` and in the wider dtype of the two (float32
      for integers).

    Raises:
      AssertionError: ``x`` has rank 0, is no numbers, or differs from ``y`` in shape.
      ValueError: as ``ewm_mean``.
      TypeError: as ``ewm_mean``, or complex numbers.

    The results are those of ``pandas.Series.ewm(...).cov(other)``, column by column;
    pandas takes no times there.

    >>> import jax.numpy as jnp
    >>> import emaopt
    >>> x = jnp.array([1.0, 2.0, 4.0])
    >>> print(emaopt.ewm_cov(x, -2 * x, 0.5))
    [       nan -1.        -4.857143]
    """
    window = _Window(decay, axis, adjust, ignore_na, min_periods, times, halflife)
    return _run(window, {"x": x, "y": y}, ((0, 1),), bias=bias)[0]


def ewm_corr(
    x: Any,
    y: Any,
    decay: Any = None,
    *,
    axis: int = 0,
    adjust: bool = True,
    ignore_na: bool = False,
    min_periods: Any = 0,
    times: Any = None,
    halflife: Any = None,
) -> jax.Array:
    """The exponentially weighted correlation of two arrays, element by element.

    cov(x, y) / (std(x) · std(y)), of the values at which both are there

    Args:
      x: an array of real numbers of rank >= 1; NaN and infinities are missing.
      y: an array of the shape of ``x``. Where either is missing, both are.
      decay: β, a scalar in [0, 1), which may be traced.
      axis: the axis of ``x`` and ``y`` that is time.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: NaN where fewer pairs have been seen, or none at all.
      times: as in ``ewm_mean``.
      halflife: as in ``ewm_mean``.

    Returns:
      The correlations, in the shape of ``x`` and in the wider dtype of the two (float32
      for integers); NaN where a variance is 0.

    Raises:
      AssertionError: ``x`` has rank 0, is no numbers, or differs from ``y`` in shape.
      ValueError: as ``ewm_mean``.
      TypeError: as ``ewm_mean``, or complex numbers.

    The results are those of ``pandas.Series.ewm(...).corr(other)``, column by column;
    pandas takes no times there.

    >>> import jax.numpy as jnp
    >>> import emaopt
    >>> x = jnp.array([1.0, 2.0, 4.0])
    >>> print(emaopt.ewm_corr(x, 3 - x, 0.5))
    [nan -1. -1.]
    """
    window = _Window(decay, axis, adjust, ignore_na, min_periods, times, halflife)
    pairs = ((0, 1), (0, 0), (1, 1))
    joint, of_x, of_y = _run(window, {"x": x, "y": y}, pairs, bias=True)
    return _ratio(joint, _root(of_x) * _root(of_y))


def _run(
    window: _Window,
    arrays: dict[str, Any],
    pairs: tuple[tuple[int, int], ...] | None,
    *,
    bias: Any = True,
) -> list[jax.Array]:
    """The means of the arrays, or the covariances of the ``pairs`` of them."""
    _checks.flag("adjust", window.adjust)
    _checks.flag("ignore_na", window.ignore_na)
    _checks.flag("bias", bias)
    least = _checks.whole("min_periods", window.min_periods, least=0)
    _checks.decay_or_times(window.decay, window.times, window.halflife)
    if window.decay is not None:
        _decay.check(window.decay)
    xs = _checks.series(arrays, real=pairs is not None)
    axis = _checks.axis("axis", window.axis, xs[0].ndim)
    xs = [jnp.moveaxis(x, axis, 0) for x in xs]
    seen = jnp.isfinite(xs[0])
    for x in xs[1:]:
        seen &= jnp.isfinite(x)
    out = _checks.common_dtype(*xs)
    dtype = _checks.wide_dtype(*(x.dtype for x in xs))
    xs = [jnp.where(seen, x, jnp.zeros_like(x)).astype(dtype) for x in xs]

    steps = xs[0].shape[0]
    clock = _clock(window, steps, _checks.real_dtype(dtype))
    flags = {"adjust": bool(window.adjust), "ignore_na": bool(window.ignore_na)}
    if pairs is None and window.decay is not None and steps:
        known = float(window.decay) if _checks.concrete(window.decay) else None
        traced = window.decay if known is None else None
        results = [_mean(xs[0], seen, clock, traced, known=known, **flags)]
    else:
        results = _relative(xs, seen, clock, pairs=pairs, bias=bool(bias), **flags)
    if not bias:
        *results, independent = results
        results = [_ratio(result, independent) for result in results]
    if not isinstance(least, int) or least > 1:
        enough = jnp.cumsum(seen, axis=0, dtype=jnp.int32) >= least
        results = [jnp.where(enough, r, jnp.full_like(r, jnp.nan)) for r in results]
    return [jnp.moveaxis(r.astype(out), 0, axis) for r in results]


class _Clock(NamedTuple):
    """What the steps do to the weights; leading axis T."""

    passed: _state.EmaState  # what a weight fades by, as states to merge
    alpha: jax.Array | None  # 1 − β of a decay


# Compiled here, lest each call outside of jit compiles its loop anew.
@partial(jax.jit, static_argnames=("known", "adjust", "ignore_na"))
def _mean(
    x: jax.Array,
    seen: jax.Array,
    clock: _Clock,
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
        return _relative([x], seen, clock, pairs=None, bias=True, **options)[0]

    return lax.cond(jnp.all(seen), complete, broken)


def _clock(window: _Window, steps: int, dtype: Any) -> _Clock:
    """The decays of all steps, each as two floats."""
    if window.times is None:
        rate = _decay.resolve(window.decay, None)
        decay = jnp.asarray(rate.decay, dtype)
        # A decay known in double keeps more digits than one float holds.
        rest = rate.decay - float(dtype.type(rate.decay)) if rate.static else 0.0
        rest = jnp.asarray(rest, dtype)
        alpha = jnp.asarray(rate.alpha, dtype)
    else:
        halflives = _elapsed(window.times, window.halflife, steps, dtype)
        gone = -jnp.expm1(-np.log(2).astype(dtype) * halflives)
        # Near 1 the decay is what is gone from 1; far from it, it has its own digits.
        near = 1 - gone
        short = halflives < 1
        decay = jnp.where(short, near, jnp.exp2(-halflives))
        rest = lax.stop_gradient(jnp.where(short, (1 - near) - gone, 0))
        alpha = None
    decay, rest, alpha = jax.tree.map(
        lambda each: jnp.broadcast_to(each, (steps,)), (decay, rest, alpha)
    )
    return _Clock(_weight(decay, rest, jnp.zeros_like(decay)), alpha)


def _weight(decay_power: jax.Array, rest: Any, weight: jax.Array) -> _state.EmaState:
    """A state of no values: a weight, and how far it has faded."""
    residual = _state.Residual(None, rest, jnp.zeros_like(weight))
    count = jnp.zeros(jnp.shape(weight), jnp.int32)
    return _state.EmaState((), decay_power, weight, count, residual)


def _elapsed(times: Any, halflife: Any, steps: int, dtype: Any) -> jax.Array:
    """The time since the step before, in half-lives; 0 at the first."""
    times, halflife = _checks.times(times, halflife, steps)
    if isinstance(times, np.ndarray):
        passed = np.diff(times)
        if not isinstance(halflife, jax.Array):
            passed, halflife = passed / halflife, 1.0
        passed = jnp.asarray(passed.astype(dtype))
    else:
        passed = jnp.diff(times).astype(dtype)
    passed = passed / jnp.asarray(halflife, dtype)
    return jnp.concatenate([jnp.zeros(min(steps, 1), dtype), passed])


@partial(jax.jit, static_argnames=("adjust", "ignore_na", "pairs", "bias"))
def _relative(
    xs: Sequence[jax.Array],
    seen: jax.Array,
    clock: _Clock,
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
    dtype = xs[0].dtype
    zero = jnp.zeros((), _checks.real_dtype(dtype))
    one = zero + 1
    averaged = xs if pairs is None else pairs
    scalar = jax.ShapeDtypeStruct((), dtype)
    averages = _state.init([scalar] * len(averaged), compensated=True)
    independent = _state.init([] if bias else [scalar], compensated=True)
    nothing = _weight(one, zero, zero)

    def step(carry: Any, inputs: Any) -> tuple[Any, list[jax.Array]]:
        weight, averages, independent, means = carry
        xs, seen, (passed, alpha) = inputs
        if adjust:
            new = one
            now = _state.merge(weight, passed._replace(weight=seen.astype(one.dtype)))
            old = (now.weight - 1) + now.residual.weight
            weight = now
        else:
            now = _state.merge(weight, passed)
            old = now.weight
            new = (1 - old) - now.residual.weight if alpha is None else alpha
            weight = _choose(seen, _weight(one, zero, one), now)
        if ignore_na:
            weight = _choose(seen, weight, carry[0])
        old, new = jnp.where(seen, old, 0), jnp.where(seen, new, 1)
        rate = _decay.Rate(old / (old + new), new / (old + new))
        if pairs is None:
            values = xs
        else:
            shifts = [(x - m) - r for x, (m, r) in zip(xs, means, strict=True)]
            values = [(rate.decay * shifts[i]) * shifts[j] for i, j in pairs]
            moved = [
                _moved(m, r + rate.alpha * shift)
                for (m, r), shift in zip(means, shifts, strict=True)
            ]
            means = _choose(seen, moved, means)
        averages = _state.advance(averages, values, rate, seen)
        if not bias:
            squared = _decay.Rate(rate.decay**2, rate.alpha * (1 + rate.decay))
            value = 2 * rate.decay / (1 + rate.decay)
            independent = _state.advance(independent, [value], squared, seen)
        out = [*_state.corrected(averages), *_state.corrected(independent)]
        return (weight, averages, independent, means), out

    def series(xs: Any, seen: Any) -> list[jax.Array]:
        means = [] if pairs is None else [(zero, zero) for _ in xs]
        carry = nothing, averages, independent, means
        return lax.scan(step, carry, (xs, seen, clock))[1]

    for _ in range(seen.ndim - 1):
        series = jax.vmap(series, in_axes=1, out_axes=1)
    return series(xs, seen)


def _moved(mean: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean moved, and what rounding left behind."""
    moved = mean + by
    return moved, by - (moved - mean)


def _choose(condition: jax.Array, chosen: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """A quotient; NaN unless the denominator is positive, without derivative there."""
    positive = denominator > 0
    quotient = numerator / jnp.where(positive, denominator, 1)
    return jnp.where(positive, quotient, jnp.nan)


def _root(variance: jax.Array) -> jax.Array:
    """A square root, with derivative 0 at 0."""
    positive = variance > 0
    root = jnp.sqrt(jnp.where(positive, variance, 1))
    return jnp.where(positive, root, jnp.where(variance == 0, 0, jnp.nan))
