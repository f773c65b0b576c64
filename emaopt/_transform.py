"""Optax transformations: an average of the updates, an average of the parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from emaopt import _arithmetic, _checks, _decay, _state

PyTree = Any


class ParamsEmaState(NamedTuple):
    """The state of ``params_ema``: an average that is one of parameters.

    Attributes:
      step: int32 scalar, the calls so far; saturates.
      ema: the ``EmaState`` of the parameters.

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> state = emaopt.params_ema(0.999).init({"w": jnp.ones(3)})
    >>> print(state.step, state.ema.m["w"])
    0 [0. 0. 0.]
    """

    step: jax.Array
    ema: _state.EmaState


def ema(
    decay: Any,
    debias: bool = True,
    accumulator_dtype: Any = None,
    *,
    compensated: bool = False,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformation:
    """Emits the exponential moving average of the updates; replaces ``optax.ema``.

    m_t = β·m_{t-1} + (1 − β)·g_t, emitted as m_t / (1 − βᵗ)

    Args:
      decay: β in [0, 1): a Python float, a NumPy or JAX scalar (traced included), an
        ``optax.Schedule`` of the number of updates absorbed so far, or a pytree prefix
        of the parameters with any of these as leaves.
      debias: emit m_t / (1 − Π β_i); False emits m_t. The state is never debiased.
      accumulator_dtype: the dtype of the state, float32 or wider; None for float32,
        or the dtype of the parameter where that is wider.
      compensated: keep what rounding leaves behind too: right to 4 ulp for ever, for
        the memory of the state once more.
      skip_nonfinite: a step with a NaN or an infinity anywhere in its updates changes
        nothing and emits the last average again (zeros before the first). Inside
        ``shard_map`` each device would decide for itself: put the average outside.

    Returns:
      A ``GradientTransformation`` whose state is an ``EmaState``. It emits updates of
      the dtypes it was given. Leaves that are not floating-point (integers, bools,
      PRNG keys, None, float0 gradients) pass through and are not stored.

    Raises:
      ValueError: a decay outside [0, 1); an ``accumulator_dtype`` below float32.
      TypeError: a decay held in a dtype narrower than float32, or a flag no bool.
      AssertionError: from ``update``, when structure, shapes or dtypes of the updates
        do not fit the state; the message names the leaf.

    The signature and the convention are those of ``optax.ema``; the correction is that
    of Adam (Kingma and Ba, 2015).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> transformation = emaopt.ema(0.999999)
    >>> state = transformation.init(jnp.zeros(2))
    >>> updates, state = transformation.update(jnp.array([1.0, -4.0]), state)
    >>> print(updates)
    [ 1. -4.]
    """
    _decay.check(decay)
    _checks.flag("debias", debias)
    _checks.flag("skip_nonfinite", skip_nonfinite)
    init = _init_fn(decay, accumulator_dtype, compensated)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, _state.EmaState]:
        del params
        _state.check(state)
        leaves = _checks.matched("updates", state.m, updates)
        rates = _decay.resolve(decay, state.count)
        observed = _all_finite(leaves) if skip_nonfinite else True
        state = _state.advance(state, leaves, rates, observed, hold=True)
        zeros = [jnp.zeros_like(leaf) for leaf in leaves]
        emitted = jax.tree.structure(state.m).unflatten(zeros)
        if debias:
            emitted = _state.corrected(state, like=emitted)
        else:
            emitted = jax.tree.map(
                lambda m, leaf: _arithmetic.cast(m, leaf.dtype), state.m, emitted
            )
        return _state.filled(emitted, updates), state

    return optax.GradientTransformation(init, update)


def params_ema(
    decay: Any,
    *,
    every: Any = 1,
    start: Any = 0,
    warm_start: bool = False,
    accumulator_dtype: Any = None,
    compensated: bool = False,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters; the last link of a chain, it changes no update.

    m_t = β·m_{t-1} + (1 − β)·(params + updates), read by ``eval_params``

    Args:
      decay: β in [0, 1), per call: a Python float, a NumPy or JAX scalar (traced
        included), an ``optax.Schedule``, or a pytree prefix of the parameters with any
        of these as leaves. A schedule maps the number of absorptions so far to the
        decay of this one (``optax.inject_hyperparams`` calls schedules itself, with
        its number of calls; what they return is then a decay per call).
      every: absorb one call in ``every``, with β^every, so that the half-life in calls
        stays; a whole number >= 1. In between the average is neither read nor written.
      start: absorb nothing in the first ``start`` calls; a whole number >= 0.
      warm_start: begin with the parameters at full weight: those of ``init``, then,
        until ``start``, the current ones. Else the average begins empty, corrected for.
      accumulator_dtype: the dtype of the average, float32 or wider; None for float32,
        or the dtype of the parameter where that is wider.
      compensated: keep what rounding leaves behind too: right to 4 ulp for ever, for
        the memory of the average once more.
      skip_nonfinite: a call that would make any parameter NaN or infinite changes
        nothing in the state, and is not counted. Inside ``shard_map`` each device
        would decide for itself: put the average outside.

    Returns:
      A ``GradientTransformationExtraArgs`` whose state is a ``ParamsEmaState``. Leaves
      that are not floating-point are not stored; leave others out with
      ``optax.masked``. Calls are numbered from 1: call s is absorbed if s > start and
      s − start is a multiple of ``every``. Inside ``optax.MultiSteps`` or
      ``optax.apply_if_finite`` only real steps are calls.

      The average may be held in the memory of the host: ``jax.device_put`` its arrays
      onto shardings of ``memory_kind="pinned_host"``. An absorption brings them to the
      devices and takes them back, and with ``every`` they stay where they are in
      between. A step that donates the state then donates the parameters with it.

    Raises:
      ValueError: a decay outside [0, 1); ``every`` or ``start`` out of range; an
        ``accumulator_dtype`` below float32; from ``update``, no ``params``.
      TypeError: a decay held in a dtype narrower than float32, or a flag no bool.
      AssertionError: from ``update``, when structure, shapes or dtypes do not fit.

    Averaged weights are due to Polyak and Juditsky (1992); the exponential form with a
    bias correction is that of Adam (Kingma and Ba, 2015).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> import optax
    >>> optimizer = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    >>> params = jnp.float32(0)
    >>> state = optimizer.init(params)
    >>> for _ in range(3):
    ...     updates, state = optimizer.update(jnp.float32(-1), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(params, emaopt.eval_params(state, params))
    3.0 2.428...
    """
    _decay.check(decay)
    every = _checks.whole("every", every, least=1)
    start = _checks.whole("start", start, least=0)
    _checks.flag("warm_start", warm_start)
    _checks.flag("skip_nonfinite", skip_nonfinite)
    every_call = isinstance(every, int) and isinstance(start, int)
    every_call = every_call and (every, start) == (1, 0)
    init_ema = _init_fn(decay, accumulator_dtype, compensated, warm_start)

    def init(params: optax.Params) -> Any:
        average: Any = init_ema(params)
        return ParamsEmaState(jnp.zeros((), jnp.int32), average)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ParamsEmaState]:
        del extra_args
        _checks.params_given("params_ema", params)
        _checks.kind_of_state("state", state, ParamsEmaState)
        _state.check(state.ema, "state.ema")
        before = _checks.matched("params", state.ema.m, params)
        changes = _checks.matched("updates", state.ema.m, updates, rule="added")
        # Outside the branches, where it is computed for the step itself as well: what
        # they read could not be updated in place.
        after = after_step(before, changes)
        ok = _all_finite(after) if skip_nonfinite else True
        step = jnp.asarray(optax.safe_increment(state.step))

        def keep(average: _state.EmaState, after: Any) -> Any:
            del after
            return average

        def absorb(average: _state.EmaState, after: Any) -> Any:
            rates = _per_absorption(decay, average.count, every)
            return _state.advance(average, after, rates, ok, hold=True)

        def follow(average: _state.EmaState, after: Any) -> Any:
            ms, treedef = jax.tree.flatten(average.m)
            current = [
                _arithmetic.cast(x, m.dtype) for x, m in zip(after, ms, strict=True)
            ]
            followed = average._replace(m=treedef.unflatten(current))
            return _state.beside(average, followed)

        if every_call:
            average = absorb(state.ema, after)
        else:
            due = (step > start) & ((step - start) % every == 0)
            # keep, absorb, or hold the current parameters until the start
            branch = jnp.asarray(due, jnp.int32)
            if warm_start:
                branch = jnp.where(step <= start, 2, branch)
            branch = jnp.where(ok, branch, 0)
            branches = [keep, absorb, follow] if warm_start else [keep, absorb]
            average = lax.switch(branch, branches, state.ema, after)
        return updates, ParamsEmaState(jnp.where(ok, step, state.step), average)

    return optax.GradientTransformationExtraArgs(init, update)


def _init_fn(
    decay: Any, accumulator_dtype: Any, compensated: bool, warm_start: bool = False
) -> optax.TransformInitFn:
    """``init`` of an average of the floating-point leaves alone."""
    _checks.accumulator(accumulator_dtype)
    _checks.flag("compensated", compensated)

    def init(params: optax.Params) -> Any:
        averaged = jax.tree.map(
            lambda leaf: leaf if _checks.is_inexact(leaf) else optax.MaskedNode(),
            params,
        )
        return _state.init(
            averaged,
            decay=decay,
            accumulator_dtype=accumulator_dtype,
            compensated=compensated,
            warm_start=warm_start,
        )

    return init


def _all_finite(leaves: Sequence[Any]) -> jax.Array:
    """Whether every number in ``leaves`` is finite; True for no leaves."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves], bool))


def after_step(before: Sequence[Any], changes: Sequence[Any]) -> list[jax.Array]:
    """The parameters after the step, rounded as ``optax.apply_updates`` rounds."""
    after = []
    for p, u in zip(before, changes, strict=True):
        p, u = jnp.asarray(p), jnp.asarray(u)
        wide = p.dtype if p.dtype == u.dtype else _checks.wide_dtype(p.dtype, u.dtype)
        total = _arithmetic.cast(p, wide) + _arithmetic.cast(u, wide)
        rounded = _arithmetic.cast(total, p.dtype)
        if jnp.finfo(p.dtype).bits < 32:
            # XLA would leave out a rounding that it sees undone right after.
            rounded = lax.optimization_barrier(rounded)
        after.append(rounded)
    return after


def _per_absorption(decay: Any, count: Any, every: Any) -> PyTree:
    """The rates of one absorption: β^every where β is a constant decay per call."""
    return jax.tree.map(
        lambda leaf, rate: rate if callable(leaf) else _arithmetic.power(rate, every),
        decay,
        _decay.resolve(decay, count),
        is_leaf=callable,
    )
