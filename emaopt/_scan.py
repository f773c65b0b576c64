"""Averages along a leading time axis."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
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

    Compiled into one ``lax.scan``; right to 4 ulp of the average of |x| at any decay
    and length. The correction is that of Adam (Kingma and Ba, 2015).

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
        custom_message="decay: expected a scalar; emaopt.scan takes one for each step.",
    )
    first = jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
    state = _state.init(first, compensated=True)
    state, corrected = scan(state, values, decay, method="scan")
    return {"final_state": state.m, "corrected": corrected}


def scan(
    state: _state.EmaState,
    values: PyTree,
    decay: Any,
    *,
    observed: Any = None,
    unobserved: str = "hold",
    reset: Any = None,
    reverse: bool = False,
    method: str = "auto",
    axis_name: Any = None,
) -> tuple[_state.EmaState, PyTree]:
    """Carries an average along the leading axis of ``values``."""
    hold = _checks.option("unobserved", unobserved, ("hold", "decay")) == "hold"
    _checks.option("method", method, ("auto", "scan", "associative", "blocked"))
    leaves = _checks.matched("values", state.m, values, time=True)
    weights, weightdef = jax.tree.flatten(state.weight)
    lead = () if not leaves else leaves[0].shape[:1]
    counts, counted = state.count, None
    masks = None
    if observed is not None:
        masks = _checks.masks("observed", observed, weightdef, weights, lead)
        if hold and jax.tree_util.all_leaves([observed]) and jnp.ndim(observed) == 1:
            counted = jnp.asarray(observed)
    rates = _decay.resolve(decay, counts)
    rates = _checks.rates(rates, weightdef, weights, _decay.is_rate, lead)
    final, averages = _sequentially(
        state, leaves, rates, masks, counted, reset, hold=hold, reverse=reverse
    )
    return final, jax.tree.structure(state.m).unflatten(averages)


def _sequentially(
    state: _state.EmaState,
    values: Sequence[Any],
    rates: Sequence[_decay.Rate],
    masks: Sequence[Any] | None,
    counted: Any,
    reset: Any,
    *,
    hold: bool,
    reverse: bool,
) -> tuple[_state.EmaState, list[jax.Array]]:
    """One ``lax.scan`` over the steps, compensated whether the state is or not."""
    varying = [None if jnp.ndim(rate.decay) == 0 else rate for rate in rates]
    dtypes = [_checks.output_dtype(x) for x in values]

    def body(carry: _state.EmaState, inputs: Any) -> Any:
        xs, now, masks, counted, reset = inputs
        if reset is not None:
            carry = _state.forget(carry, reset)
        carry = _state.step(
            carry,
            xs,
            [a if b is None else b for a, b in zip(rates, now, strict=True)],
            masks,
            hold=hold,
            counted=True if counted is None else counted,
        )
        return carry, _averages(carry, dtypes)

    start = _state.compensated(state)
    xs = (list(values), varying, masks, counted, reset)
    final, averages = lax.scan(body, start, xs, reverse=reverse)
    return _state.like(final, state), averages


def _averages(state: _state.EmaState, dtypes: Sequence[Any]) -> list[jax.Array]:
    ms, weights, *_ = _state.parts(state)
    owners = _state.owners_of(state)
    return [
        _state.cast(_state.ratio(m, weights[o]), dtype)
        for m, o, dtype in zip(ms, owners, dtypes, strict=True)
    ]
