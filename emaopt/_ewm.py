"""The exponentially weighted window of dataframes (pandas, Polars), over arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from emaopt import _checks, _decay, _moments


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
    ``adjust``, at a value behind a missing one. Those of Polars' ``ewm_mean`` are the
    same, and null where the value is; without ``adjust`` and with ``times``, those of
    its ``ewm_mean_by``.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import emaopt
    >>> x = jnp.array([2.0, jnp.nan, 7.0])
    >>> print(emaopt.ewm_mean(x, emaopt.decay_from_com(1)))
    [2. 2. 6.]
    >>> options = ("axis", "adjust", "ignore_na", "min_periods")
    >>> jitted = jax.jit(emaopt.ewm_mean, static_argnames=options)
    >>> print(jitted(x, 0.5, ignore_na=True, min_periods=2))
    [      nan       nan 5.333...]
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
      decay: as in ``ewm_mean``.
      bias: whether to leave out the denominator, which makes the variance of
        independent values unbiased; without ``bias`` that of a single value is NaN.
      axis: as in ``ewm_mean``.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: as in ``ewm_mean``.
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
    >>> print(emaopt.ewm_var(jnp.array([1e6, 1e6 + 1, 1e6 + 3]), 0.5).round(3))
    [nan 0.5 2.5]
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
      decay: as in ``ewm_mean``.
      bias: as in ``ewm_var``.
      axis: as in ``ewm_mean``.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: as in ``ewm_mean``.
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
    [0.        0.94280... 0.69985...]
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
      decay: as in ``ewm_mean``.
      bias: as in ``ewm_var``.
      axis: as in ``ewm_mean``.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: as in ``ewm_mean``.
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
    >>> print(emaopt.ewm_cov(x, -2 * x, 0.5).round(3))
    [nan -1. -5.]
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
      decay: as in ``ewm_mean``.
      axis: as in ``ewm_mean``.
      adjust: as in ``ewm_mean``.
      ignore_na: as in ``ewm_mean``.
      min_periods: as in ``ewm_mean``.
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
    >>> print(emaopt.ewm_corr(x, 3 - x, 0.5).round(3))
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
    clock = _moments.clock(
        window.decay, window.times, window.halflife, steps, _checks.real_dtype(dtype)
    )
    flags = {"adjust": bool(window.adjust), "ignore_na": bool(window.ignore_na)}
    if pairs is None and window.decay is not None and steps:
        known = float(window.decay) if _checks.concrete(window.decay) else None
        traced = window.decay if known is None else None
        results = [_moments.mean(xs[0], seen, clock, traced, known=known, **flags)]
    else:
        results = _moments.relative(
            xs, seen, clock, pairs=pairs, bias=bool(bias), **flags
        )
    if not bias:
        *results, independent = results
        results = [_ratio(result, independent) for result in results]
    if not isinstance(least, int) or least > 1:
        enough = jnp.cumsum(seen, axis=0, dtype=jnp.int32) >= least
        results = [jnp.where(enough, r, jnp.full_like(r, jnp.nan)) for r in results]
    return [jnp.moveaxis(r.astype(out), 0, axis) for r in results]


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
