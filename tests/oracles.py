"""What the tests compare with: the recurrence in float64 NumPy, never emaopt itself."""

from typing import NamedTuple

import numpy as np
import scipy.signal

ULP = 2.0**-23  # the spacing of float32 relative to 1
DECAYS = (0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


class Ema(NamedTuple):
    """m, w, βᵗ and m / w after every step, each with a leading time axis."""

    m: np.ndarray
    weight: np.ndarray
    decay_power: np.ndarray
    corrected: np.ndarray


def ema(values, decay, observed=True, unobserved="hold", reset=False):
    """m_t = β·m_{t-1} + (1 − β)·x_t as it is written, one step at a time.

    ``decay`` and ``observed`` have one value, one a step, or one for each value;
    ``reset`` one, or one a step. A step that is not observed leaves everything as it is
    ("hold"), or lets time pass and adds nothing ("decay").
    """
    values = np.asarray(values)
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    values = values.astype(kind)
    decays, observed, resets = (
        np.broadcast_to(
            a.reshape(a.shape + (1,) * (values.ndim - a.ndim)), values.shape
        )
        for a in (
            np.asarray(decay, np.float64),
            np.asarray(observed),
            np.asarray(reset),
        )
    )
    m = np.zeros(values.shape[1:], kind)
    w, p = np.zeros(values.shape[1:]), np.ones(values.shape[1:])
    history = []
    for b, x, seen, forget in zip(decays, values, observed, resets, strict=True):
        m, w, p = (np.where(forget, 0, part) for part in (m, w, p))
        kept = 1.0 if unobserved == "hold" else b
        # At b = 0 the past is gone, infinities included.
        past = b * np.where(b == 0, 0, m)
        m = np.where(seen, past + (1 - b) * np.where(seen, x, 0), kept * m)
        w = np.where(seen, b * w + (1 - b), kept * w)
        p = np.where(seen, b * p, kept * p)
        history.append((m, w, p))
    ms, ws, ps = (
        (np.stack(column) if history else np.zeros(values.shape))
        for column in (zip(*history, strict=True) if history else ((), (), ()))
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return Ema(ms, ws, ps, np.where(ws == 0, np.nan, ms / np.where(ws == 0, 1, ws)))


def corrected(values, decay):
    """m_t / w_t of a long sequence: the same recurrence, by SciPy's linear filter."""
    values = np.asarray(values, np.float64)
    decay = float(decay)
    m = scipy.signal.lfilter([1 - decay], [1, -decay], values, axis=0)
    steps = np.arange(1, values.shape[0] + 1)
    with np.errstate(divide="ignore"):
        weight = -np.expm1(steps * np.log(decay))
    return m / weight.reshape(-1, *[1] * (values.ndim - 1))


def ulps(found, values, decay):
    """The error of every corrected average in ulp: 2⁻²³ of the average of |x|.

    Where that is below 1e-26, of 1e-26: products near it are below float32's range.
    """
    found, values = np.asarray(found), np.asarray(values)
    error = np.abs(found.astype(np.float64) - corrected(values, decay))
    return error / (ULP * np.maximum(corrected(np.abs(values), decay), 1e-26))


def window(seen, decays, adjust=True, ignore_na=False, rest=None):
    """The normalised weights v of all values (columns) at every step (rows).

    By definition: adjusted, the weight of a value is the product of the decays of the
    steps behind it that count (with ``ignore_na`` those that are seen). Else what is
    there keeps the product of the decays since the last value, the next value gets
    ``rest`` (None: what is left of 1), and the sum is made 1 again.
    """
    steps = len(seen)
    rows = np.zeros((steps, steps))
    for t in range(steps if adjust else 0):
        if t and not seen[t]:
            rows[t] = rows[t - 1]  # all fade alike
        for i in np.flatnonzero(seen[: t + 1]) if seen[t] else ():
            counted = seen[i + 1 : t + 1] if ignore_na else True
            rows[t, i] = np.prod(np.where(counted, decays[i + 1 : t + 1], 1.0))
    past, left = np.zeros(steps), 0.0
    for t in range(0 if adjust else steps):
        left *= decays[t] if seen[t] or not ignore_na else 1.0
        if seen[t]:
            new = np.eye(steps)[t] * (1 - left if rest is None else rest)
            past = left * past + new
            past, left = past / past.sum(), 1.0
        rows[t] = past
    with np.errstate(invalid="ignore"):
        return rows / rows.sum(1, keepdims=True)


def ewm(name, x, y, decays, bias=False, **options):
    """A moment of columns over time, the size to measure errors against, and 1 − Σ v².

    Weighted sums over pairs of values, none of which cancels: the variance is
    Σ v_i v_j (x_i − x_j)² over the pairs i < j, and 1 − Σ v² is 2 Σ v_i v_j. The size
    of a mean is that of |x|, of a covariance the product of the deviations. The last is
    1 where nothing is divided by it.
    """
    if x.ndim > 1:
        columns = [
            ewm(name, a, b, decays, bias, **options)
            for a, b in zip(x.T, y.T, strict=True)
        ]
        return tuple(np.stack(part, axis=1) for part in zip(*columns, strict=True))
    if name not in ("cov", "corr"):
        y = x
    seen = np.isfinite(x) & np.isfinite(y)
    v = window(seen, decays, **options)
    x, y = (np.where(seen, z, 0).astype(np.float64) for z in (x, y))
    ones = np.ones(len(x))
    if name == "mean":
        return v @ x, v @ np.abs(x), ones
    dx, dy = (z[:, None] - z[None, :] for z in (x, y))

    def pairs(a):
        return np.einsum("ti,tj,ij->t", v, v, a) / 2

    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.sqrt(pairs(dx * dx)) * np.sqrt(pairs(dy * dy))
        if name == "corr":
            return pairs(dx * dy) / size, ones, ones
        left = ones if bias else 2 * pairs(1 - np.eye(len(x)))
        value, size = (
            np.where(left == 0, np.nan, a / left) for a in (pairs(dx * dy), size)
        )
        if name == "std":
            value, size = np.sqrt(value), np.sqrt(size)
        return value, size, left
