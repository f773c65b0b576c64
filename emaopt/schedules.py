"""Decay schedules: the decay of an update from the number absorbed before it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from emaopt import _checks


def warmup(decay: float) -> optax.Schedule:
    """A decay that rises to ``decay`` as the average fills.

    β(t) = min(decay, (1 + t) / (10 + t))

    Args:
      decay: the decay to end at, in [0, 1). 0.999 is reached at t = 8,990.

    Returns:
      A schedule of t, the updates that the average has absorbed (0 at the first),
      any integer or array of them up to 2³¹ − 1; β is float32.

    Raises:
      ValueError: ``decay`` outside [0, 1).
      TypeError: ``decay`` is no real number.

    The schedule of ``tf.train.ExponentialMovingAverage(num_updates=t)``; torch_ema
    uses it from t = 1 on. While it rises, the weights are close to those of a mean
    that grows as t⁸: the latest tenth of the values has over half of the weight.

    >>> from emaopt import schedules
    >>> schedule = schedules.warmup(0.999)
    >>> print(schedule(0), schedule(8), schedule(10**6))
    0.1 0.5 0.999
    """
    decay = _checks.real_number("decay", decay, lambda b: (b >= 0) & (b < 1), "[0, 1)")

    def schedule(count: Any) -> jax.Array:
        t = _float32(count)
        return jnp.minimum(decay, (1 + t) / (10 + t))

    return schedule


def inverse_gamma(
    inv_gamma: float = 1.0,
    power: float = 2 / 3,
    *,
    min_decay: float = 0.0,
    max_decay: float = 0.9999,
) -> optax.Schedule:
    """A decay that rises to 1 as a power of the age of the average.

    β(t) = min(max(1 − (1 + t / inv_gamma)^(−power), min_decay), max_decay)

    Args:
      inv_gamma: the updates after which the rise begins to follow the power; > 0.
      power: how fast it rises; > 0. Crowson, from whom the rule comes, advises 2/3
        for runs of a million steps and more (β = 0.999 at 31.6 thousand, 0.9999 at
        a million), 3/4 for shorter ones (0.999 at ten thousand).
      min_decay: a lower bound, in [0, 1].
      max_decay: an upper bound, in [min_decay, 1].

    Returns:
      A schedule of t, the updates that the average has absorbed (0 at the first),
      any integer or array of them up to 2³¹ − 1; β is float32, 0 at the first
      update where ``min_decay`` is.

    Raises:
      ValueError: an argument out of range.
      TypeError: an argument that is no real number.

    The schedule of ``EMAModel`` in diffusers, ``ModelEmaV3`` in timm and of
    ema-pytorch. With power 1 the weights are uniform; below, the average reaches
    back over a last stretch of about (t / inv_gamma)^power updates.

    >>> from emaopt import schedules
    >>> schedule = schedules.inverse_gamma(power=1.0, max_decay=0.99)
    >>> print(schedule(0), schedule(1), schedule(3), schedule(10**6))
    0.0 0.5 0.75 0.99
    """
    inv_gamma = _checks.real_number("inv_gamma", inv_gamma, _positive, "(0, inf)")
    power = _checks.real_number("power", power, _positive, "(0, inf)")
    unit = "[0, 1]"
    min_decay = _checks.real_number("min_decay", min_decay, _in_unit, unit)
    max_decay = _checks.real_number("max_decay", max_decay, _in_unit, unit)
    _checks.ordered("min_decay", min_decay, "max_decay", max_decay)

    def schedule(count: Any) -> jax.Array:
        rise = -jnp.expm1(-power * jnp.log1p(_float32(count) / inv_gamma))
        return jnp.minimum(jnp.maximum(rise, min_decay), max_decay)

    return schedule


def exponential_ramp(decay: float = 0.9999, tau: float = 2000.0) -> optax.Schedule:
    """A decay that approaches ``decay`` exponentially.

    β(t) = decay · (1 − exp(−t / tau))

    Args:
      decay: the decay to end at, in [0, 1).
      tau: the time constant in updates; > 0. 0.95·decay is reached at t = 3·tau.

    Returns:
      A schedule of t, the updates that the average has absorbed (0 at the first),
      any integer or array of them up to 2³¹ − 1; β is float32, 0 at the first
      update.

    Raises:
      ValueError: an argument out of range.
      TypeError: an argument that is no real number.

    The schedule and the defaults of ``ModelEMA`` in Ultralytics YOLO, which counts
    from t = 1. For the first few tau the average is little more than the latest
    values: its half-life is exp(t / tau)·ln 2 updates until ``decay`` limits it.

    >>> from emaopt import schedules
    >>> schedule = schedules.exponential_ramp(0.999, tau=100)
    >>> print(schedule(0), schedule(10**4))
    0.0 0.999
    """
    decay = _checks.real_number("decay", decay, lambda b: (b >= 0) & (b < 1), "[0, 1)")
    tau = _checks.real_number("tau", tau, _positive, "(0, inf)")

    def schedule(count: Any) -> jax.Array:
        return -decay * jnp.expm1(-_float32(count) / tau)

    return schedule


def uniform(window: int | None = None) -> optax.Schedule:
    """The plain mean of all updates, or of about the last ``window``.

    β(t) = 1 − 1 / min(t + 1, window)

    Args:
      window: None for the mean of everything; else the number of updates, >= 1,
        after which the mean goes on as an exponential one with decay 1 − 1 / window.

    Returns:
      A schedule of t, the updates that the average has absorbed (0 at the first),
      any integer or array of them up to 2³¹ − 1; β is float32, 0 at the first
      update. Rounding it leaves 1 − β right to a part in 2²⁵ / t: the weights are
      uniform to 1e-3 up to 30,000 updates, and from 2²⁵ on β rounds to 1 and a mean
      without a window stands still.

    Raises:
      ValueError: ``window`` is no whole number or below 1.
      TypeError: ``window`` is no number.

    Polyak averaging (Polyak and Juditsky, 1992), and the default of stochastic weight
    averaging (Izmailov et al., 2018; ``torch.optim.swa_utils``). All values have the
    weight 1 / (t + 1).

    >>> from emaopt import schedules
    >>> schedule = schedules.uniform(window=4)
    >>> print(schedule(0), schedule(1), schedule(3), schedule(100))
    0.0 0.5 0.75 0.75
    """
    if window is not None:
        window = _checks.whole("window", window, least=1)

    def schedule(count: Any) -> jax.Array:
        seen = _float32(count) + 1
        return 1 - 1 / (seen if window is None else jnp.minimum(seen, _float32(window)))

    return schedule


def power(
    gamma: float | None = None, *, sigma_rel: float | None = None
) -> optax.Schedule:
    """A power-function average: its memory is a fixed part of the training so far.

    β(t) = (1 − 1 / (t + 1))^(gamma + 1)

    Args:
      gamma: the exponent of the weights, >= 0. 0 is the plain mean.
      sigma_rel: in place of ``gamma``, the standard deviation of the weights over time,
        as a part of the training so far; in (0, 12^−½], see ``gamma_from_sigma_rel``.
        EDM2 uses 0.05 and 0.10.

    Returns:
      A schedule of t, the updates that the average has absorbed (0 at the first),
      any integer or array of them up to 2³¹ − 1; β is float32, 0 at the first
      update.

    Raises:
      ValueError: not exactly one argument, or one out of range.
      TypeError: an argument that is no real number.

    From EDM2 (Karras et al., 2024, section 3.1). Of T values absorbed, the i-th has the
    weight (i/T)^(gamma + 1) − ((i − 1)/T)^(gamma + 1), about in proportion to i^gamma.

    >>> from emaopt import schedules
    >>> print(schedules.power(1.0)(1), schedules.power(sigma_rel=12**-0.5)(1))
    0.25 0.5
    """
    _checks.one_of("gamma", gamma, "sigma_rel", sigma_rel)
    if sigma_rel is not None:
        gamma = gamma_from_sigma_rel(sigma_rel)
    exponent = 1 + _checks.real_number(
        "gamma", gamma, lambda g: (g >= 0) & (g < math.inf), "[0, inf)"
    )

    def schedule(count: Any) -> jax.Array:
        t = _float32(count)
        # 1 − β first: it is what must be right where β is near 1.
        alpha = -jnp.expm1(-exponent * jnp.log1p(1 / jnp.maximum(t, 0.5)))
        return jnp.where(t > 0, 1 - alpha, 0)

    return schedule


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """The exponent of the power-function average of a relative width.

    sigma_rel = (gamma + 1)^½ · (gamma + 2)^−1 · (gamma + 3)^−½, solved for gamma

    Args:
      sigma_rel: the standard deviation of the weights over time, as a part of the
        training so far; in (0, 12^−½].

    Returns:
      gamma, a Python float >= 0; 0 for 12^−½, the width of the plain mean.

    Raises:
      ValueError: ``sigma_rel`` out of range.
      TypeError: ``sigma_rel`` is no real number.

    From EDM2 (Karras et al., 2024, section 3.1).

    >>> from emaopt import schedules
    >>> round(schedules.gamma_from_sigma_rel(0.1), 2)
    6.94
    """
    widest = 12**-0.5
    sigma_rel = _checks.real_number(
        "sigma_rel", sigma_rel, lambda s: (s > 0) & (s <= widest), "(0, 12**-0.5]"
    )
    # From above, Newton's steps on this cubic, convex there, fall to its largest root.
    squared = float(sigma_rel) ** -2
    gamma = math.sqrt(squared)
    for _ in range(100):
        value = (gamma + 2) ** 2 * (gamma + 3) - squared * (gamma + 1)
        slope = (gamma + 2) * (3 * gamma + 8) - squared
        if value <= 0:
            break
        gamma -= value / slope
    return max(gamma, 0.0)


def _positive(value: Any) -> Any:
    return (value > 0) & (value < math.inf)


def _in_unit(value: Any) -> Any:
    return (value >= 0) & (value <= 1)


def _float32(count: Any) -> jax.Array:
    """A count of updates as float32; joined schedules are called before their turn."""
    return jnp.maximum(lax.convert_element_type(count, jnp.float32), 0)
