"""The way back: an average that is written into the parameters ("switch EMA")."""

from typing import Any

import jax
import optax
from jax import lax

from emaopt import _arithmetic, _checks, _state, _transform


def overwrite(
    decay: Any,
    *,
    every: Any,
    start: Any = 0,
    warm_start: bool = False,
    accumulator_dtype: Any = None,
    compensated: bool = False,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters, and every few calls sets them to their average.

    m_t = β·m_{t-1} + (1 − β)·(params + updates); every k calls: updates = m̂_t − params

    Args:
      decay: β in [0, 1), per call, as in ``params_ema``.
      every: the calls from one writing to the next, k; a whole number >= 1. The paper
        takes those of one epoch.
      start: absorb and write nothing in the first ``start`` calls; a whole number >= 0.
      warm_start: begin with the parameters at full weight, as in ``params_ema``.
      accumulator_dtype: the dtype of the average, as in ``params_ema``.
      compensated: keep what rounding leaves behind too, as in ``params_ema``.
      skip_nonfinite: a call that would make any parameter NaN or infinite changes
        nothing in the state, is not counted, and writes nothing.

    Returns:
      A ``GradientTransformationExtraArgs``, the last link of a chain; its state is a
      ``ParamsEmaState``, and ``eval_params`` reads the average at any time. Every call
      after ``start`` is absorbed. Call s writes if s > start and s − start is a
      multiple of ``every``: it emits updates, in the dtypes it was given, that set the
      parameters to the average, rounded as ``params + updates`` is. The average goes
      on from there, and the state of the optimizer stays as it is.

    Raises:
      ValueError: a decay outside [0, 1); ``every`` or ``start`` out of range; an
        ``accumulator_dtype`` below float32; from ``update``, no ``params``.
      TypeError: a decay held in a dtype narrower than float32, or a flag no bool.
      AssertionError: from ``update``, when structure, shapes or dtypes do not fit.

    Switch EMA (Li et al., 2024), which begins warm and writes at the end of each epoch.

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> import optax
    >>> optimizer = optax.chain(optax.sgd(1.0), emaopt.overwrite(0.5, every=2))
    >>> params = jnp.float32(0)
    >>> state = optimizer.init(params)
    >>> for _ in range(3):
    ...     updates, state = optimizer.update(jnp.float32(-3), state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     print(params)
    3.0
    5.0
    8.0
    """
    every = _checks.whole("every", every, least=1)
    start = _checks.whole("start", start, least=0)
    average = _transform.params_ema(
        decay,
        start=start,
        warm_start=warm_start,
        accumulator_dtype=accumulator_dtype,
        compensated=compensated,
        skip_nonfinite=skip_nonfinite,
    )

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, _transform.ParamsEmaState]:
        del extra_args
        _checks.params_given("overwrite", params)
        _checks.kind_of_state("state", state, _transform.ParamsEmaState)
        new: Any
        updates, new = average.update(updates, state, params)
        before = _checks.matched("params", new.ema.m, params)
        changes = _checks.matched("updates", new.ema.m, updates, rule="added")
        treedef = jax.tree.structure(new.ema.m)

        def write(average: _state.EmaState, before: Any, changes: Any) -> Any:
            after = treedef.unflatten(_transform.after_step(before, changes))
            target = jax.tree.leaves(_state.corrected(average, like=after))
            return [
                _change(p, to, u)
                for p, to, u in zip(before, target, changes, strict=True)
            ]

        def keep(average: _state.EmaState, before: Any, changes: Any) -> Any:
            del average, before
            return changes

        # A call that was skipped is not counted, and does not write again.
        counted = new.step != state.step
        due = counted & (new.step > start) & ((new.step - start) % every == 0)
        changes = lax.cond(due, write, keep, new.ema, before, changes)
        return _state.filled(treedef.unflatten(changes), updates), new

    return optax.GradientTransformationExtraArgs(average.init, update)


def _change(before: Any, target: jax.Array, update: Any) -> jax.Array:
    """The update that takes the parameters to ``target``, in its own dtype."""
    dtype = _checks.dtype_of(update)
    wide = _checks.wide_dtype(target.dtype, dtype)
    difference = _arithmetic.cast(target, wide) - _arithmetic.cast(before, wide)
    return _arithmetic.cast(difference, dtype)
