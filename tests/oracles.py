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


def ema(values, decay, observed=True, unobserved="hold"):
    """m_t = β·m_{t-1} + (1 − β)·x_t as it is written, one step at a time.

    ``decay`` has one value, or one a step; ``observed`` one, one a step, or one for
    each value. A step that is not observed leaves everything as it is ("hold"), or
    lets time pass and adds nothing ("decay").
    """
    values = np.asarray(values)
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    values = values.astype(kind)
    steps = values.shape[0]
    decays = np.broadcast_to(np.asarray(decay, np.float64), (steps,))
    observed = np.asarray(observed)
    observed = observed.reshape(observed.shape + (1,) * (values.ndim - observed.ndim))
    observed = np.broadcast_to(observed, values.shape)
    m = np.zeros(values.shape[1:], kind)
    w, p = np.zeros(values.shape[1:]), np.ones(values.shape[1:])
    history = []
    for b, x, seen in zip(decays, values, observed, strict=True):
        kept = 1.0 if unobserved == "hold" else b
        # At b = 0 the past is gone, infinities included.
        past = b * m if b else np.zeros_like(m)
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
    """The error of every corrected average in ulp: 2⁻²³ of the average of |x|."""
    found, values = np.asarray(found), np.asarray(values)
    error = np.abs(found.astype(np.float64) - corrected(values, decay))
    return error / (ULP * corrected(np.abs(values), decay))
