"""β and α = 1 − β from whatever the user gave; ranges; pandas' converters."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from emaopt import _checks


class Rate(NamedTuple):
    """A decay and its complement, rounded once from one source.

    Python floats, in double, for a decay whose value is known; else arrays. Forming
    1 − β and βᵗ from different roundings of β is what makes other averages wrong.
    """

    decay: Any  # β
    alpha: Any  # 1 − β
    splits: Any = None  # by the name of a dtype, what ``split`` gives, or None

    @property
    def static(self) -> bool:
        """Whether the decay is known while tracing."""
        return isinstance(self.decay, float)


class Split(NamedTuple):
    """A rate in the form the step multiplies by: β = coarse − rest.

    ``coarse`` is β rounded to a power of two, so that its product is exact.
    """

    decay: Any  # β
    alpha: Any  # 1 − β
    coarse: Any  # a power of two, or 0 at β = 0
    carry: Any  # 1 where coarse = 1, else 0
    rest: Any  # 0 where coarse = 1, else coarse − β
    low: Any  # what the dtype cuts off the coefficient of m, if anything, else None


def is_rate(node: Any) -> bool:
    """Whether ``node`` is one decay of a tree of decays."""
    return isinstance(node, Rate)


def is_tree(decay: Any) -> bool:
    """Whether ``decay`` is a pytree of decays rather than a single one."""
    return not callable(decay) and not jax.tree_util.all_leaves([decay])


def check(decay: Any, name: str = "decay") -> None:
    """Raises for a decay that no step could use; schedules are seen when called."""
    for path, leaf in _leaves_with_path(decay):
        if not callable(leaf):
            _rate(leaf, name + jax.tree_util.keystr(path), closed=False)


def resolve(decay: Any, count: Any, name: str = "decay") -> Any:
    """The rates of one step: a tree like ``decay``, schedules called with ``count``.

    With a vector of counts, those of as many steps.
    """

    def value(leaf: Any) -> Any:
        if not callable(leaf):
            return leaf
        return jax.vmap(leaf)(count) if np.ndim(count) else leaf(count)

    leaves = [
        leaf
        if is_rate(leaf)
        else _rate(
            value(leaf),
            name + jax.tree_util.keystr(path),
            closed=callable(leaf),
        )
        for path, leaf in _leaves_with_path(decay)
    ]
    treedef = jax.tree.structure(decay, is_leaf=lambda n: callable(n) or is_rate(n))
    return treedef.unflatten(leaves)


def prepared(rate: Rate, dtypes: Iterable[Any]) -> Rate:
    """``rate`` with its splits, computed here, once, and not in the loop that uses it.

    Behind a barrier: the compiler would compute them anew for every element.
    """
    if rate.static:
        return rate
    splits = {np.dtype(dtype).name: split(rate, dtype) for dtype in dtypes}
    return rate._replace(splits=lax.optimization_barrier(splits))


def split(rate: Rate, dtype: Any) -> Split:
    """The coefficients of the step in the real dtype ``dtype``."""
    if rate.splits is not None:
        return rate.splits[np.dtype(dtype).name]
    if rate.static:
        mantissa, exponent = math.frexp(rate.decay)
        coarse = math.ldexp(float(mantissa >= 0.75) + 1.0, exponent - 1)
        coarse = coarse if rate.decay else 0.0
        carry = float(coarse == 1.0)
        rest = 0.0 if carry else coarse - rate.decay
        exact = rate.alpha if carry else rest
        low = exact - float(np.asarray(exact, dtype))
        return Split(rate.decay, rate.alpha, coarse, carry, rest, low or None)
    decay = rate.decay.astype(dtype)
    coarse = _power_of_two(decay)
    whole = coarse == 1
    rest = coarse.astype(rate.decay.dtype) - rate.decay
    exact = jnp.where(whole, rate.alpha, rest)
    low = exact - exact.astype(dtype).astype(exact.dtype)
    return Split(
        decay,
        rate.alpha.astype(dtype),
        coarse,
        whole.astype(dtype),
        jnp.where(whole, 0, rest.astype(dtype)),
        None if exact.dtype == dtype else low.astype(dtype),
    )


def split_sum(decay: jax.Array, left: jax.Array) -> Split:
    """``split`` for a decay that is the sum of two floats."""
    coarse = _power_of_two(decay)
    whole = coarse == 1
    rest = coarse - decay  # exact
    alpha = (1 - decay) - left
    low = jnp.where(whole, (rest - alpha) - left, -left)
    return Split(
        decay, alpha, coarse, whole.astype(decay.dtype), jnp.where(whole, 0, rest), low
    )


def two_floats(rate: Rate, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """β in ``dtype``, what that leaves behind of it, and α."""
    decay, alpha = jnp.asarray(rate.decay, dtype), jnp.asarray(rate.alpha, dtype)
    if rate.static:
        low = rate.decay - float(np.asarray(rate.decay, dtype))
        return decay, jnp.asarray(low, dtype), alpha
    # Of a decay below ½ in its own dtype, α is what is rounded.
    low = jnp.where(
        rate.decay < 0.5, 0, (1 - decay.astype(rate.decay.dtype)) - rate.alpha
    )
    return decay, low.astype(dtype), alpha


def _power_of_two(decay: jax.Array) -> jax.Array:
    """``decay`` rounded to a power of two; 0 stays."""
    uint, half, exponent = {
        4: (np.uint32, 0x0040_0000, 0x7F80_0000),
        8: (np.uint64, 0x0008_0000_0000_0000, 0x7FF0_0000_0000_0000),
    }[decay.dtype.itemsize]
    bits = lax.bitcast_convert_type(decay, uint) + uint(half)
    return lax.bitcast_convert_type(bits & uint(exponent), decay.dtype)


def _leaves_with_path(decay: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(
        decay, is_leaf=lambda node: node is None or callable(node) or is_rate(node)
    )[0]


def _rate(value: Any, name: str, *, closed: bool) -> Rate:
    """One decay as a rate, its dtype and its range checked."""
    _checks.decay_dtype(name, value)
    _checks.decay_range(name, value, closed=closed)
    if _checks.concrete(value) and np.ndim(value) == 0:
        known = float(value)
        return Rate(known, 1.0 - known)
    # As wide as there is: the complement is rounded in the dtype of the decay.
    array = jnp.asarray(value).astype(jax.dtypes.canonicalize_dtype(np.float64))
    known = isinstance(value, np.ndarray)
    rest = 1 - value.astype(np.float64) if known else 1 - array
    return Rate(array, jnp.asarray(rest, array.dtype))


def decay_from_alpha(alpha: float) -> float:
    """The decay for pandas' smoothing factor alpha.

    β = 1 − α

    Args:
      alpha: the weight of the newest value; 0 < alpha <= 1.

    Returns:
      The decay, a Python float in [0, 1).

    Raises:
      ValueError: alpha is outside (0, 1], or so small that the decay rounds to 1 in
        double precision (from 1e-16 on).
      TypeError: not one real number.

    The parameter and its range are those of ``pandas.DataFrame.ewm``.

    >>> from emaopt import decay_from_alpha
    >>> decay_from_alpha(0.25)
    0.75
    """
    return 1.0 - _checks.real_number(
        "alpha", alpha, lambda a: (a > 1e-16) & (a <= 1), "(1e-16, 1]"
    )


def decay_from_com(com: float) -> float:
    """The decay for pandas' centre of mass.

    β = com / (1 + com)

    Args:
      com: the mean age of the weights, in steps; com >= 0.

    Returns:
      The decay, a Python float in [0, 1).

    Raises:
      ValueError: com is negative, not finite, or so large that the decay rounds to 1
        in double precision (from 9e15 on).
      TypeError: not one real number.

    The parameter and its range are those of ``pandas.DataFrame.ewm``.

    >>> from emaopt import decay_from_com
    >>> decay_from_com(9)
    0.9
    """
    com = _checks.real_number("com", com, lambda c: (c >= 0) & (c < 9e15), "[0, 9e15)")
    return com / (1.0 + com)


def decay_from_span(span: float) -> float:
    """The decay for pandas' span, the "N-step" exponential window.

    β = (span − 1) / (span + 1)

    Args:
      span: the span in steps; span >= 1.

    Returns:
      The decay, a Python float in [0, 1).

    Raises:
      ValueError: span is below 1, not finite, or so large that the decay rounds to 1
        in double precision (from 9e15 on).
      TypeError: not one real number.

    The parameter and its range are those of ``pandas.DataFrame.ewm``.

    >>> from emaopt import decay_from_span
    >>> decay_from_span(19)
    0.9
    """
    span = _checks.real_number(
        "span", span, lambda s: (s >= 1) & (s < 9e15), "[1, 9e15)"
    )
    return (span - 1.0) / (span + 1.0)


def decay_from_halflife(halflife: float) -> float:
    """The decay under which a value's weight halves every ``halflife`` steps.

    β = 0.5^(1 / halflife)

    Args:
      halflife: the half-life in steps; halflife > 0.

    Returns:
      The decay, a Python float in [0, 1).

    Raises:
      ValueError: halflife is not positive, not finite, or so long that the decay
        rounds to 1 in double precision (from 6e15 on).
      TypeError: not one real number.

    The parameter and its range are those of ``pandas.DataFrame.ewm``.

    >>> from emaopt import decay_from_halflife
    >>> decay_from_halflife(1)
    0.5
    """
    halflife = _checks.real_number(
        "halflife", halflife, lambda h: (h > 0) & (h < 6e15), "(0, 6e15)"
    )
    return 0.5 ** (1.0 / halflife)


def halflife_from_decay(decay: float) -> float:
    """The number of steps after which a value's weight has halved.

    halflife = ln 0.5 / ln β

    Args:
      decay: the decay; 0 <= decay < 1.

    Returns:
      The half-life in steps, a Python float; 0 for decay 0.

    Raises:
      ValueError: decay is outside [0, 1).
      TypeError: not one real number.

    The inverse of ``decay_from_halflife``, whose parameter is pandas'.

    >>> from emaopt import halflife_from_decay
    >>> round(halflife_from_decay(0.999), 1)
    692.8
    """
    decay = _checks.real_number("decay", decay, lambda b: (b >= 0) & (b < 1), "[0, 1)")
    return math.log(0.5) / math.log(decay) if decay else 0.0
