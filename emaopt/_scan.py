"""Averages along a leading time axis."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from emaopt import _checks, _decay, _methods, _state

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
    [2.125] [1.        1.666... 2.428...]
    """
    values = _checks.sequence("values", values)
    chex.assert_rank(
        decay,
        0,
        custom_message="decay: expected a scalar; emaopt.scan takes one for each step.",
    )
    first = jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
    if len(values):  # a row, which has the sharding of the average
        first = values[0]
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
    """Carries an average along the leading axis of ``values``, as ``lax.scan`` does.

    m_t = β_t·m_{t-1} + (1 − β_t)·x_t, m̂_t = m_t / w_t, from the given state

    Args:
      state: from ``init`` or an earlier call. A compensated state makes a sequence
        split into calls equal the whole, bit for bit (methods "scan" and "auto" where
        it is that).
      values: a tree like ``state.m``, each leaf (T, ...) with the shape of its average
        behind the time axis; numbers.
      decay: β in [0, 1): a scalar, or an array (T,), or for a per-element state an
        array (T, ...) like ``values``; traced or not. An ``optax.Schedule`` of the
        count, or a pytree prefix of ``values`` with any of these as leaves, as in
        ``update``.
      observed: bool (T,), or for a per-element state a tree like ``values``. Values
        that are not observed are not read; their average is the last one (NaN before
        the first).
      unobserved: "hold" keeps the state, "decay" lets time pass and adds nothing: a
        gap fades what was seen before it, to a weight of 2⁻⁶³ at the least.
      reset: bool (T,); where True, all before this step is forgotten, but the count:
        for packed sequences and episodes.
      reverse: go from the last step to the first.
      method: "scan", one compensated ``lax.scan``; "associative", ``merge`` by a
        ``lax.associative_scan`` of log T depth, for accelerators; "blocked", blocks by
        one small triangular matrix product each (a constant decay; no mask, no reset;
        real values; not split bit for bit); "auto", "blocked" on CPU for a constant
        decay, leaves of at most 8 elements a step, and T >= 30,000, else "scan":
        measured on two CPU cores, where "blocked" takes 0.1 to 0.9 of the time of
        "scan" there, and "associative" loses everywhere.
      axis_name: inside ``jax.shard_map``, the mesh axis, or a tuple of axes, that time
        is sharded over, in order; ``state`` is replicated over it. Costs one all-gather
        of the states, or an all-reduce where the mesh has axes that are not manual.
        ``sharded_scan`` sets up the ``shard_map``.

    Returns:
      The final state, as ``update`` would have left it, for the whole sequence; and the
      corrected averages, a tree of (T, ...) in the dtypes of ``values`` (float32 for
      integers and bools), row t with what had been seen after step t.

    Raises:
      AssertionError: structure, shapes or dtypes of ``values`` do not fit the state.
      ValueError: a decay out of range; a decay, mask or reset of another shape; an
        unknown ``method`` or ``unobserved``; "blocked" where it does not apply.
      TypeError: a decay held in a dtype narrower than float32, a mask that is no bool.

    Right to 4 ulp of the average of |x| by "scan" and "blocked", to 8 by "associative"
    and sharded. Carry in, carry out is the convention of ``jax.lax.scan``; the parallel
    form is that of Blelloch (1990).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> x = np.array([1.0, np.nan, 3.0], np.float32)
    >>> state = emaopt.init(jnp.float32(0), compensated=True)
    >>> state, average = emaopt.scan(state, x, 0.5, observed=~np.isnan(x))
    >>> print(average, state.count)
    [1.        1.        2.333...] 2
    """
    hold = _checks.option("unobserved", unobserved, ("hold", "decay")) == "hold"
    _checks.option("method", method, ("auto", "scan", "associative", "blocked"))
    _checks.flag("reverse", reverse)
    axes = _axes(axis_name)
    if axes:
        _checks.mesh_axis(axis_name)
    _state.check(state)
    values = _checks.matched("values", state.m, values, time=True)
    _, weights, _, treedef, weightdef = _state.parts(state)
    lead = _checks.time_axis(values, decay, observed, reset)
    reset = _checks.resets(reset, lead)
    masks = counted = None
    if observed is not None:
        masks = _checks.masks("observed", observed, weightdef, weights, lead)
        if hold and jax.tree_util.all_leaves([observed]) and jnp.ndim(observed) == 1:
            counted = jnp.asarray(observed)
    counts = None
    if any(map(callable, jax.tree.leaves(decay))):
        counts = _methods.counts(state, lead[0], counted, axes, reverse=reverse)
    rates = _decay.resolve(decay, counts)
    rates = _checks.rates(rates, weightdef, weights, _decay.is_rate, lead)
    # Not those within a leaf, used once: they would take six times the memory.
    shared = [rate if jnp.ndim(rate.decay) <= 1 else None for rate in rates]
    shared = _state.prepared(state, shared)
    rates = [a or b for a, b in zip(shared, rates, strict=True)]
    constant = [jnp.ndim(rate.decay) == 0 for rate in rates]
    problem = _methods.Problem(
        inputs=_methods.Inputs(
            values=values,
            rates=[None if c else r for c, r in zip(constant, rates, strict=True)],
            masks=masks,
            counted=jnp.ones(lead, bool) if counted is None and masks else counted,
            reset=reset,
        ),
        rates=[r if c else None for c, r in zip(constant, rates, strict=True)],
        steps=lead[0],
        hold=hold,
        reverse=reverse,
    )
    run = _chosen(method, state, problem)
    start = _state.compensated(state)
    if axes:
        final, averages = _methods.sharded(start, problem, axes, run)
    else:
        start = _methods.alike(start, problem)
        final, averages = _run(run, start, problem)
    return _state.like(final, state), treedef.unflatten(averages)


def sharded_scan(
    mesh: jax.sharding.Mesh,
    axis_name: Any,
    state: _state.EmaState,
    values: PyTree,
    decay: Any,
    **options: Any,
) -> tuple[_state.EmaState, PyTree]:
    """``scan`` with time sharded over an axis of a mesh.

    Sets up the ``jax.shard_map`` that ``scan(..., axis_name=axis_name)`` runs in.

    Args:
      mesh: a mesh of devices.
      axis_name: the axis of ``mesh`` that time is sharded over, or a tuple of several.
      state: from ``init`` or an earlier call.
      values: as in ``scan``, each leaf (T, ...), T a multiple of the size of the axis.
        What is sharded over other axes of the mesh stays so.
      decay: as in ``scan``.
      **options: those of ``scan``, ``axis_name`` excepted.

    Returns:
      What ``scan`` returns: the final state, the same on every device of the axis, and
      the averages, sharded over it in time.

    Raises:
      ValueError: T is no multiple of the size of the axis, or the mesh has no such
        axis; and as ``scan``.

    Right to 8 ulp of the average of |x|. Call it under ``jax.jit``.

    >>> import emaopt
    >>> import jax
    >>> import jax.numpy as jnp
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("time",))
    >>> @jax.jit
    ... def smooth(state, x):
    ...     return emaopt.sharded_scan(mesh, "time", state, x, 0.5)
    >>> state, average = smooth(emaopt.init(jnp.float32(0)), jnp.ones(48))
    >>> print(average.sum(), state.count)
    48.0 48
    """
    axes = _axes(axis_name)
    _checks.axes_of(mesh, axis_name, axes)
    leaves = _checks.matched("values", state.m, values, time=True)
    values = jax.tree.unflatten(jax.tree.structure(state.m), leaves)
    observed, reset = options.pop("observed", None), options.pop("reset", None)
    steps, *_ = _checks.time_axis(leaves, decay, observed, reset)
    _checks.shards(steps, math.prod(mesh.shape[axis] for axis in axes), axis_name)
    # Known decays in time as rates: as float32 arguments they would lose digits.
    decay = jax.tree.map(
        lambda leaf: _decay.resolve(leaf, None) if np.ndim(leaf) else leaf,
        decay,
        is_leaf=callable,
    )
    inputs, treedef = jax.tree.flatten((values, decay, observed, reset))
    # Not the scalars of known value: a decay would lose digits as an argument.
    arrays = {
        index: _sharded_in_time(leaf, mesh, axes) if np.ndim(leaf) else leaf
        for index, leaf in enumerate(inputs)
        if np.ndim(leaf) or isinstance(leaf, Tracer)
    }

    def local(state: _state.EmaState, arrays: dict[int, Any]) -> Any:
        leaves = [arrays.get(index, leaf) for index, leaf in enumerate(inputs)]
        values, decay, observed, reset = treedef.unflatten(leaves)
        return scan(
            state,
            values,
            decay,
            observed=observed,
            reset=reset,
            axis_name=axis_name,
            **options,
        )

    in_time = {i: P(axes) if np.ndim(leaf) else P() for i, leaf in arrays.items()}
    return jax.shard_map(
        local,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(P(), in_time),
        out_specs=(P(), P(axes)),
    )(state, arrays)


def _sharded_in_time(leaf: Any, mesh: jax.sharding.Mesh, axes: tuple) -> Any:
    """``leaf`` as ``shard_map`` takes it: where an axis is explicit, sharded before."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = all(kinds[axis] == jax.sharding.AxisType.Explicit for axis in axes)
    if not explicit or not hasattr(jax, "reshard"):  # in 0.8, shard_map reshards
        return leaf
    leaf = jnp.asarray(leaf)
    rest = [
        None if set(jax.tree.leaves(part)) & set(axes) else part
        for part in jax.typeof(leaf).sharding.spec[1:]
    ]
    return jax.reshard(leaf, jax.sharding.NamedSharding(mesh, P(axes, *rest)))


def _axes(axis_name: Any) -> tuple[str, ...]:
    """The mesh axes that ``axis_name`` names: none, one or a tuple."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _run(
    run: Callable, state: _state.EmaState, problem: _methods.Problem
) -> _methods.Outcome:
    """``run``, compiled once where it is called by itself, and not at every call."""
    arrays = state, problem.inputs, problem.rates
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        return run(state, problem)
    known = [r if r is not None and r.static else None for r in problem.rates]
    others = [None if k else r for k, r in zip(known, problem.rates, strict=True)]
    fixed = problem.steps, problem.hold, problem.reverse, tuple(known)
    return _compiled(run, fixed, state, problem.inputs, others)


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(run: Callable, fixed: Any, state: Any, inputs: Any, rates: Any) -> Any:
    """``run`` on a problem in two parts, of which ``fixed`` is known while tracing."""
    steps, hold, reverse, known = fixed
    rates = [a or b for a, b in zip(known, rates, strict=True)]
    problem = _methods.Problem(_methods.Inputs(*inputs), rates, steps, hold, reverse)
    return run(state, problem)


def _chosen(method: str, state: _state.EmaState, problem: _methods.Problem) -> Any:
    """The function that runs ``method``; "auto" by static facts alone."""
    real = all(m.dtype.kind == "f" for m in _state.parts(state)[0])
    possible = problem.plain and real
    if method == "blocked":
        _checks.blocked_applies(possible)
    if method == "auto":
        narrow = possible and _methods.block_size(problem, state) > 0
        fast = narrow and problem.steps >= 30_000 and jax.default_backend() == "cpu"
        method = "blocked" if fast else "scan"
    return {
        "scan": _methods.sequential,
        "associative": _methods.associative,
        "blocked": _methods.blocked,
    }[method]
