"""The arithmetic of an average: the one place that multiplies by the decay.

m' = β·m + α·x, α = 1 − β, as y = α·(x − k·m) + (β·r − q·m), m' = c·m + y, where c is
β rounded to a power of two, so that c·m is exact; r' = y − (m' − c·m) is left behind.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from emaopt import _checks, _decay


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in ``dtype``, strongly typed."""
    return lax.convert_element_type(x, dtype)


def where(mask: Any, x: jax.Array, y: Any) -> jax.Array:
    """``jnp.where`` in the dtype and sharding of ``x``, whatever the scalar ``y``."""
    if jnp.ndim(mask):
        mask = mask & jnp.ones_like(x, bool)
    return jnp.where(mask, x, jnp.asarray(y, x.dtype))


def faded(gap: Any, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where a ``gap`` takes a weight to nothing, and the share of it to keep instead.

    A gap fades the past to a weight of 2⁻⁶³ (2⁻⁵¹¹ in float64), of which no digit is
    left in what comes next, and no further: the average would become 0 / 0.
    """
    least = _least(old.dtype)
    large = old > least
    # A power of two: average and weight keep all their digits.
    share = _leading(least / jnp.where(large, old, least))
    return gap & (new < least) & (old != 0), lax.stop_gradient(share)


def kept(when: Any, share: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """``old``, or the ``share`` of it, where ``when``; else ``new``."""
    return jnp.where(when, old if share is None else scaled(share, old), new)


def is_gap(weight: jax.Array, decay_power: jax.Array) -> jax.Array:
    """Whether a stretch of steps observes nothing, and resets nothing."""
    return (weight == 0) & (decay_power > 0)


def above_zero(gap: Any, decay_power: jax.Array) -> jax.Array:
    """The decay power, which does not become 0 in a ``gap``: only a reset does that."""
    low = gap & (decay_power < _least(decay_power.dtype))
    return where(~low, decay_power, _least(decay_power.dtype))


def _least(dtype: Any) -> float:
    return float(jnp.finfo(dtype).tiny) ** 0.5


def power(rate: _decay.Rate, n: Any) -> _decay.Rate:
    """The rate of n equal steps taken as one: βⁿ and 1 − βⁿ, by doubling."""

    def both(a: _decay.Rate, b: _decay.Rate) -> _decay.Rate:
        alpha = a.alpha + a.decay * b.alpha
        # Near 1 the decay is right to an ulp only as 1 − α: squaring doubles errors.
        product = a.decay * b.decay
        if a.static and b.static:
            return _decay.Rate(product, alpha)
        return _decay.Rate(jnp.where(alpha < 0.5, 1 - alpha, product), alpha)

    if isinstance(n, int):
        if n == 1:
            return rate
        half = power(rate, n // 2)
        return both(both(half, half), rate) if n % 2 else both(half, half)
    decay = jnp.asarray(rate.decay, jnp.float32) if rate.static else rate.decay
    rate = _decay.Rate(decay, jnp.asarray(rate.alpha, decay.dtype))

    def double(bit: Any, carry: Any) -> Any:
        result, square = carry
        taken = (n >> bit) & 1 == 1
        result = jax.tree.map(
            lambda new, old: jnp.where(taken, new, old), both(result, square), result
        )
        return result, both(square, square)

    nothing = _decay.Rate(jnp.ones_like(rate.decay), jnp.zeros_like(rate.alpha))
    return lax.fori_loop(0, 31, double, (nothing, rate))[0]


class Span(NamedTuple):
    """What a stretch of steps does to the state before it, in lists.

    Π β is carried as two floats: products of single ones would lose a digit with each.
    """

    ms: Sequence[jax.Array]  # for each leaf, (n, ...)
    weights: Sequence[jax.Array]  # for each weight, (n, ...), as the next two
    decays: Sequence[jax.Array]  # Π β
    lows: Sequence[jax.Array]  # what rounding left behind of it


def compose(owners: Sequence[int], gaps: bool, earlier: Span, later: Span) -> Span:
    """The span of two consecutive ones, which may have ``gaps``; associative."""
    decays, lows, kept = [], [], []
    for w, p, r, v, q, s in zip(*earlier[1:], *later[1:], strict=True):
        decay, low = _product_of_powers(p, r, q, s)
        alpha = (1 - q) - s
        if gaps:
            gap = is_gap(v, q)
            decay = above_zero(gap & is_gap(w, p), decay)
            faint, share = faded(gap, w, q * w)
            q, alpha = jnp.where(faint, share, q), jnp.where(faint, 1 - share, alpha)
        decays.append(decay)
        lows.append(low)
        kept.append(_decay.Rate(q, alpha))

    def onto(owner: int, value: jax.Array, start: jax.Array) -> jax.Array:
        return added(kept[owner].decay, kept[owner].alpha, value, start)

    own = range(len(kept))
    return Span(
        [onto(*each) for each in zip(owners, later.ms, earlier.ms, strict=True)],
        [onto(*each) for each in zip(own, later.weights, earlier.weights, strict=True)],
        decays,
        lows,
    )


@jax.custom_jvp
def _product_of_powers(p: Any, r: Any, q: Any, s: Any) -> tuple[Any, Any]:
    """(p + r)·(q + s) as two floats, for powers of decays: between 0 and 1."""
    p_high, q_high = _high(p), _high(q)
    p_low, q_low = p - p_high, q - q_high
    # Each product of halves is exact, and no larger than the sum it is added to.
    total = p_high * q_high
    error = p_low * q_low + (p * s + q * r)
    for product in (p_high * q_low, p_low * q_high):
        new = total + product
        error = error + (product - (new - total))
        total = new
    new = total + error
    return new, error - (new - total)


@_product_of_powers.defjvp
def _product_of_powers_jvp(primals: Any, tangents: Any) -> Any:
    p, _, q, _ = primals
    d_p, _, d_q, _ = tangents
    out = _product_of_powers(*primals)
    return out, (d_p * q + p * d_q, jnp.zeros_like(out[1]))


def added(decay: Any, alpha: Any, value: jax.Array, start: jax.Array) -> jax.Array:
    """Value + β·start, as value − α·start + start while α < ½."""
    low = alpha < 0.5
    share = jnp.where(low, -alpha, decay)
    return (value + scaled(share, start)) + scaled(low, start)


def scaled(share: jax.Array, x: jax.Array) -> jax.Array:
    """Share · x, where ``share`` lacks trailing axes of ``x``; 0 · inf is 0."""
    share = share.reshape(share.shape + (1,) * (x.ndim - share.ndim))
    return _product(cast(share, _checks.real_dtype(x.dtype)), x)


@jax.custom_jvp
def _product(share: jax.Array, x: jax.Array) -> jax.Array:
    """Share · x, and 0 where ``share`` is 0, whatever ``x``."""
    if x.dtype.kind == "c":
        return _by_parts(_product, share, x)
    return where(share != 0, share * x, 0)


@_product.defjvp
def _product_jvp(primals: Any, tangents: Any) -> Any:
    share, x = primals
    d_share, d_x = (cast(tangent, x.dtype) for tangent in tangents)
    finite = where(jnp.isfinite(x), x, 0)
    return _product(share, x), d_share * finite + cast(share, x.dtype) * d_x


class BlockTables(NamedTuple):
    """What a block of steps at one rate multiplies by, each rounded once."""

    decay: jax.Array  # β^j for the steps j = 1, 2, ... of the block
    alpha: jax.Array  # 1 − β^j
    kernel: jax.Array  # α·β^(i−j) at [i, j] for j <= i, else 0
    whole: _decay.Rate  # of the block as one step


def block_tables(rate: _decay.Rate, size: int, dtype: Any) -> BlockTables:
    """The tables of a block of ``size`` steps, from powers held as two floats."""
    if rate.static:
        decay = jnp.asarray(rate.decay, dtype)
        rest = jnp.asarray(rate.decay - float(np.asarray(rate.decay, dtype)), dtype)
    else:
        decay = cast(rate.decay, dtype)
        rest = cast(rate.decay - cast(decay, rate.decay.dtype), dtype)
    high, low = decay[None], rest[None]
    while len(high) < size:
        zeros = jnp.zeros_like(high)
        more, left = scaled_sum(high[-1], low[-1], high, low, zeros, None)
        high, low = jnp.concatenate([high, more]), jnp.concatenate([low, left])
    high, low = high[:size], low[:size]
    one, none = jnp.ones_like(high[:1]), jnp.zeros_like(high[:1])
    impulse = jnp.concatenate([one, high[:-1]]) - high
    impulse = impulse + (jnp.concatenate([none, low[:-1]]) - low)
    age = np.subtract.outer(np.arange(size), np.arange(size))
    kernel = jnp.where(age >= 0, impulse[np.maximum(age, 0)], 0)
    # Behind a barrier: else they are computed anew for every block.
    high, low, alpha, kernel = lax.optimization_barrier(
        (high, low, (1 - high) - low, kernel)
    )
    if rate.static:
        return BlockTables(high, alpha, kernel, power(rate, size))
    splits = {np.dtype(dtype).name: _decay.split_sum(high[-1], low[-1])}
    whole = _decay.Rate(high[-1], alpha[-1], lax.optimization_barrier(splits))
    return BlockTables(high, alpha, kernel, whole)


def block_sums(tables: BlockTables, x: jax.Array) -> jax.Array:
    """The raw averages (blocks, steps, ...) of blocks that begin empty."""
    exact = lax.Precision.HIGHEST
    return jnp.einsum("ij,kj...->ki...", tables.kernel, x, precision=exact)


def block_states(tables: BlockTables, x: jax.Array, start: jax.Array) -> jax.Array:
    """The raw averages of blocks that begin with ``start`` (blocks, 1, ...), finite."""
    ones = (1,) * (x.ndim - 2)
    decay, alpha = (t.reshape(1, -1, *ones) for t in (tables.decay, tables.alpha))
    low = alpha < 0.5
    return (x + jnp.where(low, -alpha, decay) * start) + cast(low, x.dtype) * start


@jax.custom_jvp
def ratio(m: jax.Array, w: jax.Array) -> jax.Array:
    """M / w; NaN where w = 0, without a NaN in its derivative."""
    if m.dtype.kind == "c":
        return _by_parts(ratio, m, w)
    return m / cast(w, m.dtype)


@ratio.defjvp
def _ratio_jvp(primals: Any, tangents: Any) -> Any:
    m, w = primals
    d_m, d_w = tangents
    out = ratio(m, w)
    weight = cast(jnp.where(w == 0, 1, w), m.dtype)
    d_out = (
        d_m - where(w == 0, jnp.zeros_like(out), out) * cast(d_w, m.dtype)
    ) / weight
    return out, d_out


def recur(
    rates: Sequence[_decay.Rate],
    owners: Sequence[int],
    ms: Sequence[jax.Array],
    residuals: Sequence[Any],
    xs: Sequence[jax.Array],
    noise: Any,
) -> tuple[list[jax.Array], list[Any]]:
    """M' = β·m + α·x for every leaf at once, and what rounding left behind.

    Differentiated as the exact recurrence: rounding has no derivative.
    """
    static = [rate if rate.static else None for rate in rates]

    @jax.custom_jvp
    def step(traced: Any, ms: Any, residuals: Any, xs: Any, noise: Any) -> Any:
        both = [a or b for a, b in zip(static, traced, strict=True)]
        splits: dict[Any, _decay.Split] = {}
        out, last = [], None
        for owner, m, r, x in zip(owners, ms, residuals, xs, strict=True):
            key = owner, _checks.real_dtype(m.dtype)
            if key not in splits:
                splits[key] = _decay.split(both[owner], key[1])
            if (
                _IN_ORDER
                and r is not None
                and m.size >= _LARGE
                and isinstance(m, Tracer)
            ):
                # XLA copies m, which r' needs after m' has taken its place. One leaf
                # after the other, they share one copy.
                if last is not None:
                    (m, r), out[last] = lax.optimization_barrier(((m, r), out[last]))
                last = len(out)
            out.append(_leaf_step(splits[key], m, r, x, noise))
        return [m for m, _ in out], [r for _, r in out]

    def jvp(primals: Any, tangents: Any) -> Any:
        traced, ms, _, xs, _ = primals
        d_traced, d_ms, _, d_xs, _ = tangents
        both = [a or b for a, b in zip(static, traced, strict=True)]
        out = step(*primals)
        d_out = []
        for owner, m, x, d_m, d_x in zip(owners, ms, xs, d_ms, d_xs, strict=True):
            terms = [(both[owner].decay, d_m), (both[owner].alpha, d_x)]
            if d_traced[owner] is not None:
                terms += [(d_traced[owner].decay, m), (d_traced[owner].alpha, x)]
            d_out.append(_sum_of_products(terms, m))
        return out, (d_out, jax.tree.map(jnp.zeros_like, out[1]))

    step.defjvp(jvp, symbolic_zeros=True)
    traced = [None if rate.static else rate for rate in rates]
    return step(traced, list(ms), list(residuals), list(xs), noise)


_LARGE = 1024  # numbers in a leaf whose copy is worth saving
# Before, XLA dropped barriers too early to keep an order, and JAX let what one leaf
# varies over, inside `shard_map`, spread to the others.
_IN_ORDER = jax.__version_info__ >= (0, 12)


def _sum_of_products(terms: Sequence[tuple[Any, Any]], like: jax.Array) -> jax.Array:
    total = None
    for a, b in terms:
        if isinstance(a, SymbolicZero) or isinstance(b, SymbolicZero):
            continue
        product = jnp.asarray(a, like.dtype) * jnp.asarray(b, like.dtype)
        total = product if total is None else total + product
    if total is None:
        return jnp.zeros_like(like)
    return jnp.broadcast_to(total, like.shape)


def _leaf_step(
    split: _decay.Split, m: jax.Array, r: Any, x: jax.Array, noise: Any
) -> tuple[jax.Array, Any]:
    """The step of one leaf: y is all that is added to the exact product c·m.

    y = α·(x − k·m) + (β·r − q·m), m' = c·m + y, r' = y − (m' − c·m)
    """
    if m.dtype.kind == "c":
        return _by_parts(partial(_leaf_step, split), m, r, x, noise)
    if not isinstance(split.decay, float):
        return _traced_step(split, m, r, x, noise)
    if split.decay == 0:
        return x, None if r is None else jnp.zeros_like(r)
    if split.decay == 1:
        return m, r
    return _static_step(bool(split.carry), split, m, r, x, noise)


# Compiled by itself so that leaves of one shape are traced once.
@partial(jax.jit, static_argnums=0)
def _static_step(
    near_one: bool, split: _decay.Split, m: jax.Array, r: Any, x: jax.Array, noise: Any
) -> tuple[jax.Array, Any]:
    """``_leaf_step`` for a decay in (0, 1) that is known to round to 1, or not to."""
    y = split.alpha * (x - m) if near_one else split.alpha * x - split.rest * m
    kept = m if near_one else split.coarse * m
    if r is not None and near_one:
        # In no sum two products: which of them is contracted would be left to the
        # compiler, and with it the last bits of a sequence in parts.
        y = split.alpha * ((x - m) - r) + _left(r, split.low, m)
    elif r is not None:
        y = y + _left(split.decay * r, split.low, m)
    if r is not None:
        new = kept + y
        return new, y - (new - kept)
    return kept + (_dithered(y, kept, noise) if near_one else y), None


@jax.jit
def _traced_step(
    split: _decay.Split, m: jax.Array, r: Any, x: jax.Array, noise: Any
) -> tuple[jax.Array, Any]:
    """``_leaf_step`` for a decay that is not known."""
    decay, alpha, coarse, carry, rest, low = split
    m = _drop(m, decay != 0)
    y = _drop(alpha * (x - carry * m), alpha != 0)
    kept = coarse * m
    if r is not None:
        y = y + (_left(decay * _drop(r, decay != 0), low, m) - rest * m)
        new = kept + y
        return new, y - (new - kept)
    y = y - rest * m
    moving = jnp.where(alpha == 0, 0, carry)
    return kept + _dithered(y, kept, moving * cast(noise, m.dtype)), None


def _dithered(y: jax.Array, kept: jax.Array, noise: Any) -> jax.Array:
    """``y`` with noise below the last digit of kept + y; exactly 0 stays."""
    # Of the sum, not of m: just below a power of two the grid it lands on is coarser.
    noise = cast(noise, y.dtype) * 2.0 ** -_BITS[y.dtype.itemsize][2]
    return y + jnp.where(y == 0, 0, noise * _leading(kept + y))


def _left(r: jax.Array, low: Any, m: jax.Array) -> jax.Array:
    """``r``, less what the digits of the decay below its dtype take from ``m``."""
    return r if low is None else r - low * m


@jax.custom_jvp
def scaled_sum(p: Any, r_p: Any, a: Any, r_a: Any, b: Any, r_b: Any) -> Any:
    """(p + r_p)·(a + r_a) + (b + r_b) as two floats, without a where p = 0."""
    if a.dtype.kind == "c":
        return _by_parts(scaled_sum, p, r_p, a, r_a, b, r_b)
    p, r_p = cast(p, a.dtype), cast(r_p, a.dtype)
    a = _drop(a, p != 0)
    p_high, a_high = _high(p), _high(a)
    p_low, a_low = p - p_high, a - a_high
    # Products of halves are exact, so that it is no matter which of them the compiler
    # contracts into a multiply-add.
    total, error = _two_sum(p_high * a_high, b)
    for product in (p_high * a_low, p_low * a_high):
        total, left = _two_sum(total, product)
        error = error + left
    error = (error + p_low * a_low) + r_p * a
    if r_a is not None:
        error = error + p * _drop(r_a, p != 0)
    if r_b is not None:
        error = error + r_b
    new, left = _two_sum(total, jnp.where(jnp.isfinite(total), error, 0))
    return new, None if r_a is None else jnp.where(jnp.isfinite(new), left, 0)


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A + b rounded, and what that left behind (Knuth, 1969)."""
    total = a + b
    grown = total - a
    return total, (a - (total - grown)) + (b - grown)


_BITS = {4: (np.uint32, 0x7F80_0000, 23), 8: (np.uint64, 0x7FF0_0000_0000_0000, 52)}


def _drop(x: jax.Array, keep: Any) -> jax.Array:
    """``x`` where ``keep``, else 0: what 0 multiplies may be infinite."""
    return where(keep, x, 0)


def _leading(x: jax.Array) -> jax.Array:
    """The power of two at or below |x|."""
    uint, exponent, _ = _BITS[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, uint) & uint(exponent)
    return lax.bitcast_convert_type(bits, x.dtype)


def _high(x: jax.Array) -> jax.Array:
    """``x`` with the lower half of its digits cleared: products of such are exact."""
    uint, low = {4: (np.uint32, 0xFFF), 8: (np.uint64, 0x7FF_FFFF)}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, uint) & uint(~uint(low))
    return lax.bitcast_convert_type(bits, x.dtype)


@scaled_sum.defjvp
def scaled_sum_jvp(primals: Any, tangents: Any) -> Any:
    """The derivative of p·a + b; rounding has none."""
    p, _, a, *_ = primals
    d_p, _, d_a, _, d_b, _ = tangents
    out = scaled_sum(*primals)
    d_out = jnp.asarray(p, a.dtype) * d_a + jnp.asarray(d_p, a.dtype) * a + d_b
    return out, (d_out, None if out[1] is None else jnp.zeros_like(out[1]))


def dither(count: jax.Array) -> jax.Array:
    """One number in [−½, ½) for the step number ``count``, evenly spread.

    Every 16 steps take 16 numbers 1/16 apart, shifted and in strides that a hash
    draws anew: what is even in every block cancels the rounding of a constant, and
    what is random from block to block cannot resonate with a period of the values.
    A fixed stride, such as the golden ratio, does where ``m`` crosses a power of two.
    """
    n = count.astype(jnp.uint32)
    h = n >> 4
    for multiplier in (0x85EB_CA6B, 0xC2B2_AE35):  # the finaliser of MurmurHash3
        h = (h ^ (h >> 16)) * np.uint32(multiplier)
    h = h ^ (h >> 16)
    mixed = n * ((h | np.uint32(1)) << 28) + h
    noise = lax.bitcast_convert_type(mixed, jnp.int32).astype(jnp.float32) * 2.0**-32
    # Without a barrier every element of every leaf would compute it anew.
    return lax.optimization_barrier(noise)


def _by_parts(function: Callable, *args: Any) -> Any:
    """A function of real arrays, on the parts of those that are complex."""

    def on(part: Callable) -> Any:
        return function(
            *(
                part(a) if getattr(a, "dtype", np.dtype(bool)).kind == "c" else a
                for a in args
            )
        )

    return jax.tree.map(lax.complex, on(jnp.real), on(jnp.imag))


def quotient(
    m: jax.Array, r: Any, w: jax.Array, r_w: jax.Array, like: Any
) -> jax.Array:
    """The average m / w, in the floating dtype of ``like``; ``like`` where w = 0."""
    return _quotient(isinstance(m, Tracer), m, r, w, r_w, like)


# Compiled by itself so that leaves of one shape are traced once.
@partial(jax.jit, static_argnums=0)
def _quotient(
    fused: bool, m: jax.Array, r: Any, w: jax.Array, r_w: jax.Array, like: Any
) -> Any:
    # No NaN where `like` steps in: jax_debug_nans would object.
    average = mean(m, r, w, r_w, jnp.nan if like is None else 0.0, fused)
    if like is None:
        return average
    if _checks.is_inexact(like):
        average = cast(average, _checks.dtype_of(like))
    return jnp.where(w != 0, average, cast(jnp.asarray(like), average.dtype))


def mean(
    m: jax.Array, r: Any, w: jax.Array, r_w: jax.Array, empty: float, fused: bool = True
) -> jax.Array:
    """(m + r) / (w + r_w), rounded about once; ``empty`` where w = 0.

    Unless ``fused``, it rounds alike however the arrays are sharded.
    """
    if m.dtype.kind == "c":
        return _by_parts(mean, m, r, w, r_w, empty, fused)
    seen = w != 0
    weight = cast(jnp.where(seen, w, 1), m.dtype)
    apart = (lambda x: x) if fused else lax.optimization_barrier
    quotient = apart(m / apart(weight))
    product = apart(quotient * cast(r_w, m.dtype))
    left = -product if r is None else r - product
    left = jnp.where(jnp.isfinite(quotient), left / weight, 0)
    # Adding 0 would lose the sign of a zero.
    rounded = jnp.where(left == 0, quotient, quotient + lax.stop_gradient(left))
    return jnp.where(seen, rounded, empty)
