"""Averages along a leading time axis, compiled into one ``lax.scan``."""

from typing import Any

import chex
import jax
from jax import lax

from emaopt import _checks, _decay, _state

PyTree = Any


def ema_scan(values: jax.Array, decay: Any) -> dict[str, jax.Array]:
    """The bias-corrected average of a sequence at every step.

    m_t = β·m_{t-1} + (1 − β)·x_t from m_0 = 0, and m̂_t = m_t / (1 − βᵗ)

    Args:
      values: x, shape (T, ...), numbers of any dtype; T may be 0.
      decay: β, a scalar in [0, 1), which may be traced.

    Returns:
      A dict of two arrays: ``final_state``, shape (...), the raw average m_T, in the
      accumulator's dtype (float32; float64 and complex as the values are); and
      ``corrected``, shape (T, ...), with m̂_t in row t − 1, in the dtype of ``values``
      (float32 for integers and bools).

    Raises:
      AssertionError: ``values`` has rank 0 or is no numbers; ``decay`` is no scalar.
      ValueError: a ``decay`` of known value outside [0, 1).
      TypeError: a ``decay`` held in a dtype narrower than float32.

    Right to 4 ulp of the average of |x| at any decay and length. The correction is
    that of Adam (Kingma and Ba, 2015).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> out = emaopt.ema_scan(jnp.array([[1.0], [2.0], [3.0]]), 0.5)
    >>> print(out["final_state"], out["corrected"].ravel())
    [2.125] [1.        1.6666666 2.4285715]
    """
    values = _checks.sequence("values", values)
    chex.assert_rank(
        decay,
        0,
        custom_message="decay: expected a scalar; emaopt.scan takes one a step.",
    )
    first = jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
    state, corrected = scan(_state.init(first, compensated=True), values, decay)
    return {"final_state": state.m, "corrected": corrected}


def scan(
    state: _state.EmaState, values: PyTree, decay: Any
) -> tuple[_state.EmaState, PyTree]:
    """Carries an average along the leading axis of ``values``."""
    leaves = _checks.matched("values", state.m, values, time=True)
    rate = _decay.resolve(decay, None)

    def step(carry: _state.EmaState, xs: Any) -> tuple[_state.EmaState, PyTree]:
        carry = _state.advance(carry, xs, rate, True, hold=True)
        return carry, _state.corrected(carry)

    final, averages = lax.scan(step, state, leaves)
    return final, jax.tree.map(
        lambda average, x: _state.cast(average, _checks.output_dtype(x)),
        averages,
        jax.tree.structure(state.m).unflatten(leaves),
    )
