"""The state of an average, and what is done with it.

m_t = β_t · m_{t-1} + (1 − β_t) · x_t, and the same recurrence for the weight (of
x = 1) and the decay power (of x = 0, from 1), each with what rounding left behind.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from emaopt import _arithmetic, _checks, _decay
from emaopt._arithmetic import cast, where

PyTree = Any


class Residual(NamedTuple):
    """What rounding left behind of the fields of an ``EmaState``."""

    of_m: PyTree  # like m where the state is compensated, else None
    of_decay_power: PyTree  # like decay_power
    of_weight: PyTree  # like weight


class EmaState(NamedTuple):
    """The state of an exponential moving average; a pytree of arrays.

    m_t = β_t · m_{t-1} + (1 − β_t) · x_t and m̂_t = m_t / w_t, w_t = 1 − Π β_i.

    Attributes:
      m: the raw average m_t, a tree like the values, each leaf at least float32;
        ``optax.MaskedNode()`` where a leaf is not averaged.
      decay_power: βᵗ, the product of the decays so far, 1 at the start: one float32
        scalar; or a tree of one scalar for each leaf of a pytree of decays; or a
        tree shaped like ``m`` for a per-element state. float64 over float64 leaves.
      weight: w_t, the weight of the observations so far, like ``decay_power``. It is
        1 − βᵗ while every step is observed.
      count: int32 scalar, the steps that entered the average; saturates.
      residual: what rounding left behind, for ``decay_power`` and ``weight`` always,
        for ``m`` where the state is compensated (else None there).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> state = emaopt.init({"loss": jnp.float32(0)})
    >>> state = emaopt.update(state, {"loss": jnp.float32(3)}, 0.75)
    >>> print(state.m["loss"], state.decay_power, state.weight, state.count)
    0.75 0.75 0.25 1
    """

    m: PyTree
    decay_power: PyTree
    weight: PyTree
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: Residual


def init(
    tree: PyTree,
    *,
    decay: Any = None,
    accumulator_dtype: Any = None,
    compensated: bool = False,
    per_element: bool = False,
    warm_start: bool = False,
) -> EmaState:
    """The state of an average that has seen nothing yet, or only ``tree``.

    m = 0, w = 0, βᵗ = 1; with ``warm_start`` m = tree, w = 1, βᵗ = 0.

    Args:
      tree: any pytree of numbers of any shape, ``jax.ShapeDtypeStruct`` included.
        Integers and bools are averaged as float32. ``optax.MaskedNode()`` and None
        are passed over.
      decay: only where the decay is a pytree: that tree, a prefix of ``tree``. Its
        structure becomes that of ``decay_power`` and ``weight``.
      accumulator_dtype: the dtype of ``m``, float32 or wider; None for float32, or
        the dtype of the leaf where that is wider. Complex leaves stay complex.
      compensated: keep what rounding leaves behind of ``m`` too: the average is then
        right to 4 ulp for ever, at the price of the memory of ``m`` once more.
      per_element: weights shaped like ``m``, for masks or decays that differ within a
        leaf.
      warm_start: start from a copy of ``tree`` with full weight.

    Returns:
      An ``EmaState`` whose arrays have the shardings of the leaves of ``tree`` (its
      scalars are replicated), and share no buffer with them.

    Raises:
      TypeError: a leaf that is no number, such as a PRNG key; named by its path.
      ValueError: an ``accumulator_dtype`` below float32 or narrower than a leaf; a
        ``decay`` whose structure is no prefix of ``tree``; ``warm_start`` from an
        abstract value.

    The zero start with a bias correction is that of Adam (Kingma and Ba, 2015).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> state = emaopt.init(jnp.ones(3, jnp.bfloat16))
    >>> print(state.m, state.m.dtype, state.weight)
    [0. 0. 0.] float32 0.0
    """
    requested = _checks.accumulator(accumulator_dtype)
    for name, value in (
        ("compensated", compensated),
        ("per_element", per_element),
        ("warm_start", warm_start),
    ):
        _checks.flag(name, value)

    def start(path: Any, leaf: Any) -> Any:
        dtype = _checks.accumulator_for(path, leaf, requested)
        if warm_start:
            _checks.not_abstract(path, leaf)
            return jnp.array(leaf, dtype=dtype, copy=True)
        return zeros_like(leaf, dtype)

    m = jax.tree_util.tree_map_with_path(start, tree)
    if per_element:
        weight = jax.tree.map(lambda leaf: zeros_like(leaf, _real(leaf)), m)
    elif decay is None or not _decay.is_tree(decay):
        weight = jnp.zeros((), _weight_dtype(m))
    else:
        _checks.prefix("decay", decay, tree)
        # A tree of no leaves stands for any (optax.tree.map_params hands one in).
        parts = m if jax.tree.leaves(m) else jax.tree.map(lambda _: (), decay)
        weight = jax.tree.map(
            lambda _, part: jnp.zeros((), _weight_dtype(part)), decay, parts
        )

    def like(reference: PyTree, fill: float) -> PyTree:
        # Each array is made anew: a state is donated, and no buffer twice.
        return jax.tree.map(lambda leaf: zeros_like(leaf, leaf.dtype) + fill, reference)

    return EmaState(
        m=m,
        decay_power=like(weight, 0 if warm_start else 1),
        weight=like(weight, 1) if warm_start else weight,
        count=jnp.zeros((), jnp.int32),
        residual=Residual(
            of_m=like(m, 0) if compensated else None,
            of_decay_power=like(weight, 0),
            of_weight=like(weight, 0),
        ),
    )


def update(
    state: EmaState,
    tree: PyTree,
    decay: Any,
    *,
    observed: Any = True,
    unobserved: str = "hold",
) -> EmaState:
    """One step of the average.

    m' = β·m + (1 − β)·x, w' = β·w + (1 − β), (βᵗ)' = β·βᵗ

    Args:
      state: from ``init``; it stays usable, whatever happens here.
      tree: the values x, of the structure and the shapes of ``state.m``, each real or
        complex, and no wider than its accumulator.
      decay: β in [0, 1): a Python float, a NumPy or JAX scalar (traced included), an
        ``optax.Schedule`` of ``state.count`` (which may also return 1: the step then
        counts and changes nothing), or a pytree prefix of ``tree`` with any of these
        as leaves (the state then comes from ``init(..., decay=decay)``).
      observed: a bool scalar, or a prefix of the structure of ``state.weight``; for a
        per-element state arrays that broadcast to the shapes of its leaves. Values
        that are not observed are not read, NaN included.
      unobserved: what a step that is not observed does: "hold" changes nothing,
        "decay" lets time pass and adds nothing.

    Returns:
      The new state, in the shapes, dtypes and shardings of the old. Without
      compensation the rounding of ``m`` is dithered, so that it never stalls.

    Raises:
      AssertionError: structure, shape or dtype of ``tree`` do not fit the state.
      ValueError: a decay out of range, a mask finer than the state, or an unknown
        ``unobserved``.
      TypeError: a decay held in a dtype narrower than float32.

    The recurrence with a running product of the decays as its bias correction is that
    of Adam (Kingma and Ba, 2015), generalised to a decay that varies.

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> state = emaopt.init(jnp.zeros(2))
    >>> for x in (jnp.array([1.0, 2.0]), jnp.array([2.5, 3.5])):
    ...     state = emaopt.update(state, x, 0.5)
    >>> print(emaopt.corrected(state))
    [2. 3.]
    """
    hold = _checks.option("unobserved", unobserved, ("hold", "decay")) == "hold"
    check(state)
    values = _checks.matched("tree", state.m, tree)
    rates = _decay.resolve(decay, state.count)
    return advance(state, values, rates, observed, hold=hold)


def advance(
    state: EmaState,
    values: Sequence[Any],
    rates: PyTree,
    observed: Any = True,
    *,
    hold: bool = True,
) -> EmaState:
    """``update``, given the leaves of the values and the rates of this step."""
    held, state = state, on_device(state)
    weights, weightdef = jax.tree.flatten(state.weight)
    each_rate = _checks.rates(rates, weightdef, weights, _decay.is_rate)
    each_rate = prepared(state, each_rate)
    if observed is True:
        return beside(held, step(state, values, each_rate))
    masks = _checks.masks("observed", observed, weightdef, weights)
    counted: Any = True
    if hold and jax.tree_util.all_leaves([observed]) and jnp.ndim(observed) == 0:
        counted = observed
    return beside(
        held, step(state, values, each_rate, masks, hold=hold, counted=counted)
    )


def prepared(state: EmaState, rates: Sequence[Any]) -> list[Any]:
    """The rates with what steps of ``state`` multiply by; None stays None."""
    ms, weights, *_ = parts(state)
    owners = [*owners_of(state), *range(len(weights))]
    dtypes: list[set] = [set() for _ in weights]
    for owner, leaf in zip(owners, [*ms, *weights], strict=True):
        dtypes[owner].add(_real(leaf))
    return [
        rate if rate is None else _decay.prepared(rate, sorted(kinds, key=str))
        for rate, kinds in zip(rates, dtypes, strict=True)
    ]


def step(
    state: EmaState,
    values: Sequence[Any],
    rates: Sequence[_decay.Rate],
    masks: Sequence[Any] | None = None,
    *,
    hold: bool = True,
    counted: Any = True,
) -> EmaState:
    """One step, with a rate and a mask for each weight of the state."""
    ms, weights, powers, _, _ = parts(state)
    compensated = state.residual.of_m is not None
    residuals = left_behind(state)
    old = [*ms, *weights, *powers]
    n = len(weights)
    owners = [*owners_of(state), *range(n), *range(n, 2 * n)]
    rates = [*rates, *rates]

    xs = [cast(jnp.asarray(x), m.dtype) for x, m in zip(values, ms, strict=True)]
    ones = [jnp.ones_like(w) for w in weights]
    if masks is not None:
        xs = [where(masks[o], x, 0) for x, o in zip(xs, owners, strict=False)]
        ones = [where(mask, one, 0) for mask, one in zip(masks, ones, strict=True)]
    new, new_residuals = _arithmetic.recur(
        rates,
        owners,
        old,
        residuals,
        [*xs, *ones, *(jnp.zeros_like(p) for p in powers)],
        None if compensated else _arithmetic.dither(state.count),
    )
    if masks is not None:
        gaps = [jnp.logical_not(mask) for mask in (*masks, *masks)]
        kept: list[tuple[Any, Any]] = [(gap, None) for gap in gaps]
        if not hold:
            kept = [
                _arithmetic.faded(gap, a, b)
                for gap, a, b in zip(gaps, old[len(ms) :], new[len(ms) :], strict=True)
            ]
        if not hold and counted is not True:
            off = jnp.logical_not(counted)
            kept = [(off | when, where(counted, share, 1)) for when, share in kept]
        new, new_residuals = (
            [
                None if b is None else _arithmetic.kept(*kept[o], a, b)
                for o, a, b in zip(owners, *both, strict=True)
            ]
            for both in ((old, new), (residuals, new_residuals))
        )
    count = jnp.asarray(optax.safe_increment(state.count))
    return rebuilt(
        state,
        new,
        new_residuals
        if compensated
        else [*[None] * len(ms), *new_residuals[len(ms) :]],
        count if counted is True else jnp.where(counted, count, state.count),
    )


def forget(state: EmaState, when: Any) -> EmaState:
    """Drops all that the average has seen, where ``when``; the count stays.

    βᵗ becomes 0, not 1: nothing of an earlier state may come in by ``merge`` either.
    """

    def drop(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: where(when, jnp.zeros_like(leaf), leaf), tree)

    return EmaState(
        drop(state.m),
        drop(state.decay_power),
        drop(state.weight),
        state.count,
        drop(state.residual),
    )


def check(state: Any, name: str = "state") -> None:
    """Raises unless ``state`` is an ``EmaState`` whose weights fit its leaves."""
    _checks.kind_of_state(name, state, EmaState)
    weights = jax.tree.leaves(state.weight)
    _checks.weights_fit(state.m, [weights[owner] for owner in owners_of(state)])


def parts(state: EmaState) -> tuple[list, list, list, Any, Any]:
    """Leaves of m, weight and decay power, and the structures of the first two."""
    ms, treedef = jax.tree.flatten(state.m)
    weights, weightdef = jax.tree.flatten(state.weight)
    powers = weightdef.flatten_up_to(state.decay_power)
    return ms, weights, powers, treedef, weightdef


def left_behind(state: EmaState) -> list[Any]:
    """The residuals of ``parts``, in the same order; None for those that are none."""
    ms, _, _, treedef, weightdef = parts(state)
    of_m, of_power, of_weight = state.residual
    return [
        *([None] * len(ms) if of_m is None else treedef.flatten_up_to(of_m)),
        *weightdef.flatten_up_to(of_weight),
        *weightdef.flatten_up_to(of_power),
    ]


def rebuilt(
    state: EmaState, new: Sequence[Any], residuals: Sequence[Any], count: Any
) -> EmaState:
    """A state like ``state`` of other leaves: those of m, the weights, the powers."""
    ms, weights, _, treedef, weightdef = parts(state)
    k, s = len(ms), len(ms) + len(weights)
    return EmaState(
        m=treedef.unflatten(new[:k]),
        decay_power=weightdef.unflatten(new[s:]),
        weight=weightdef.unflatten(new[k:s]),
        count=count,
        residual=Residual(
            of_m=None
            if state.residual.of_m is None
            else treedef.unflatten(residuals[:k]),
            of_decay_power=weightdef.unflatten(residuals[s:]),
            of_weight=weightdef.unflatten(residuals[k:s]),
        ),
    )


def emptied(state: EmaState) -> EmaState:
    """A compensated state like ``state`` that has seen nothing."""
    zeros = jax.tree.map(jnp.zeros_like, compensated(state))
    ones = jax.tree.map(jnp.ones_like, state.decay_power)
    return zeros._replace(decay_power=ones)


def compensated(state: EmaState) -> EmaState:
    """The state with a residual of m."""
    if state.residual.of_m is not None:
        return state
    zeros = jax.tree.map(jnp.zeros_like, state.m)
    return state._replace(residual=state.residual._replace(of_m=zeros))


def like(state: EmaState, other: EmaState) -> EmaState:
    """The state without its residual of m, where ``other`` has none."""
    if other.residual.of_m is not None:
        return state
    return state._replace(residual=state.residual._replace(of_m=None))


def corrected(state: EmaState, like: PyTree = None) -> PyTree:
    """The bias-corrected average, the mean of the values seen so far.

    m̂ = m / w

    Args:
      state: an ``EmaState``.
      like: a tree of the structure and shapes of ``state.m``, or None. Its leaves
        give the dtypes of the result where they are floating-point, the values where
        nothing has been observed yet, and the leaves that the state does not average.

    Returns:
      A tree like ``state.m``, in the dtypes of ``like`` (without it, and where that
      is an integer, in those of the accumulators). Where nothing has been observed
      yet, the leaf of ``like``; NaN without it.

    Raises:
      AssertionError: structure or shapes of ``like`` do not fit the state, or it is
        real where the average is complex.

    The correction is that of Adam (Kingma and Ba, 2015) for a constant decay.

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> state = emaopt.init(jnp.float32(0))
    >>> print(emaopt.corrected(state), emaopt.corrected(state, like=jnp.float32(7)))
    nan 7.0
    >>> print(emaopt.corrected(emaopt.update(state, jnp.float32(3), 0.999)))
    3.0
    """
    state = on_device(state)
    check(state)
    ms, treedef = jax.tree.flatten(state.m)
    likes = [None] * len(ms)
    if like is not None:
        likes = _checks.matched("like", state.m, like, rule="read")
    weights, weightdef = jax.tree.flatten(state.weight)
    weight_residuals = weightdef.flatten_up_to(state.residual.of_weight)
    residuals = [None] * len(ms)
    if state.residual.of_m is not None:
        residuals = treedef.flatten_up_to(state.residual.of_m)
    out = [
        _arithmetic.quotient(m, r, weights[o], weight_residuals[o], leaf)
        for m, r, o, leaf in zip(ms, residuals, owners_of(state), likes, strict=True)
    ]
    averages = treedef.unflatten(out)
    return averages if like is None else filled(averages, like)


def merge(earlier: EmaState, later: EmaState) -> EmaState:
    """The state of two consecutive stretches of a stream, averaged apart.

    m = p_later · m_earlier + m_later, w alike, p = p_earlier · p_later (p = βᵗ)

    Args:
      earlier: the state of the first stretch.
      later: the state of the second, of the same structure, shapes and dtypes, begun
        with ``init`` without a warm start.

    Returns:
      The state as if one average had seen both.

    Raises:
      AssertionError: the states do not fit each other.

    Associative; the identity is a state fresh from ``init``. This is the composition
    of first-order linear recurrences (Blelloch, 1990).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> empty = emaopt.init(jnp.float32(0))
    >>> one = emaopt.update(empty, jnp.float32(1), 0.5)
    >>> three = emaopt.update(empty, jnp.float32(3), 0.5)
    >>> print(emaopt.corrected(emaopt.merge(one, three)))
    2.333...
    """
    check(earlier, "earlier")
    check(later, "later")
    _checks.matched("later.m", earlier.m, later.m)
    _checks.same_types("later", earlier, later)
    return _merged(earlier, later)


@jax.jit
def _merged(earlier: EmaState, later: EmaState) -> EmaState:
    """``merge`` of states that fit each other."""
    ms, weights, powers, _, _ = parts(earlier)
    later_ms, later_weights, later_powers, _, _ = parts(later)
    k, n = len(ms), len(weights)
    old = zip([*ms, *weights, *powers], left_behind(earlier), strict=True)
    left = left_behind(later)
    new = [*zip([*later_ms, *later_weights], left[: k + n], strict=True)]
    new += [(jnp.zeros_like(p), jnp.zeros_like(p)) for p in powers]
    whole = [*zip(later_powers, left[k + n :], strict=True)]
    gaps = [*map(_arithmetic.is_gap, later_weights, later_powers)]
    kept = []
    for gap, weight, (power, rest) in zip(gaps, weights, whole, strict=True):
        low, share = _arithmetic.faded(gap, weight, power * weight)
        kept.append((where(~low, power, share), where(~low, rest, 0)))
    owners = [*owners_of(earlier), *range(n), *range(n, 2 * n)]
    factors = [[*kept, *whole][o] for o in owners]
    out = [
        _arithmetic.scaled_sum(p, r_p, a, r_a, b, r_b)
        for (p, r_p), (a, r_a), (b, r_b) in zip(factors, old, new, strict=True)
    ]
    for o, gap in enumerate(gaps):
        gap = gap & _arithmetic.is_gap(weights[o], powers[o])
        power, rest = out[k + n + o]
        out[k + n + o] = _arithmetic.above_zero(gap, power), rest
    count = total(earlier.count, later.count)
    return rebuilt(earlier, [m for m, _ in out], [r for _, r in out], count)


def filled(averages: PyTree, tree: PyTree) -> PyTree:
    """``averages``, with what ``tree`` has where nothing is averaged."""
    return jax.tree.map(
        lambda average, leaf: leaf if _checks.is_masked(average) else average,
        averages,
        tree,
        is_leaf=_checks.is_masked,
    )


def blocks(
    state: EmaState,
    values: Sequence[jax.Array],
    rates: Sequence[_decay.Rate],
    otherwise: Callable[[EmaState], tuple[EmaState, list[jax.Array]]],
) -> tuple[EmaState, list[jax.Array]]:
    """Averages blocks of steps at constant rates, by matrix products.

    The values are (blocks, steps, D), a leaf of ``m`` flattened to D, or (blocks,
    steps); the corrected averages come back flat: each shape would bring a layout of
    its own through the branch, and a copy. A matrix product is not causal, 0 · inf
    reaches earlier rows: where a sum is not finite, what ``otherwise`` returns.
    """
    ms, weights, *_ = parts(state)
    owners = owners_of(state)
    count, size, *_ = values[0].shape
    kinds = [(owner, m.dtype) for owner, m in zip(owners, ms, strict=True)]
    kinds += [(owner, w.dtype) for owner, w in enumerate(weights)]
    tables = {
        (owner, dtype): _arithmetic.block_tables(rates[owner], size, dtype)
        for owner, dtype in kinds
    }
    whole = [tables[owner, w.dtype].whole for owner, w in enumerate(weights)]
    for (owner, _), table in tables.items():
        if not table.whole.static:
            splits = whole[owner].splits | table.whole.splits
            whole[owner] = whole[owner]._replace(splits=splits)
    sums = [
        _arithmetic.block_sums(tables[owner, x.dtype], x)
        for owner, x in zip(owners, values, strict=True)
    ]
    # Into the last row of a block go all its values.
    ends = [
        (x[:, -1] / tables[owner, x.dtype].alpha[-1]).reshape(count, *m.shape)
        for owner, x, m in zip(owners, sums, ms, strict=True)
    ]

    def body(carry: EmaState, end: Any) -> Any:
        after = step(carry, end, whole)
        return after, (jax.tree.leaves(carry.m), jax.tree.leaves(carry.weight))

    def carried(state: EmaState) -> tuple[EmaState, list[jax.Array]]:
        final, (starts, start_weights) = lax.scan(body, state, ends, unroll=2)
        averages = []
        for owner, x, start in zip(owners, sums, starts, strict=True):
            w, w_start = weights[owner], start_weights[owner]
            # As (blocks, steps) or (blocks, steps, elements), like the values.
            shape = (math.prod(w.shape),) if x.ndim == 3 else ()
            table = tables[owner, w.dtype]
            ones = table.alpha.reshape(1, size, *[1] * len(shape))
            within = _arithmetic.block_states(
                table, ones, w_start.reshape(count, 1, *shape)
            )
            m = _arithmetic.block_states(
                tables[owner, x.dtype], x, start.reshape(count, 1, *x.shape[2:])
            )
            # Fused with the flattening, the loop would no longer use vectors.
            average = lax.optimization_barrier(_arithmetic.ratio(m, within))
            averages.append(average.ravel())
        steps = total(state.count, np.int32(count * size))
        return final._replace(count=steps), averages

    finite = [jnp.all(jnp.isfinite(x)) for x in [*ends, *ms, *weights]]
    return lax.cond(jnp.all(jnp.array(finite)), carried, otherwise, state)


def total(count: jax.Array, more: Any) -> jax.Array:
    """The sum of two counts, which saturates."""
    most = np.int32(2**31 - 1)
    return jnp.where(count > most - more, most, count + more)


def owners_of(state: EmaState) -> list[int]:
    """For each leaf of ``m``, the number of the weight that is its own."""
    treedef = jax.tree.structure(state.weight)
    numbers = treedef.unflatten(range(treedef.num_leaves))
    return jax.tree.leaves(jax.tree.broadcast(numbers, state.m))


def on_device(state: EmaState) -> EmaState:
    """The state in the memory of its devices; that of the host only holds it."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if _on_host(x) else x,
        state,
    )


def beside(held: EmaState, new: EmaState) -> EmaState:
    """``new``, each array in host memory where that of ``held`` is."""
    return jax.tree.map(
        lambda old, x: jax.device_put(x, jax.memory.Space.Host) if _on_host(old) else x,
        held,
        new,
    )


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def zeros_like(leaf: Any, dtype: Any) -> jax.Array:
    """Zeros in the shape and sharding of ``leaf``, under ``jit`` as well."""
    if isinstance(leaf, Tracer):
        return _zeros(leaf, np.dtype(dtype))
    return jnp.zeros_like(leaf, dtype=dtype)


# Compiled by itself so that leaves of one shape are traced once.
@partial(jax.jit, static_argnums=1)
def _zeros(leaf: jax.Array, dtype: np.dtype) -> jax.Array:
    # A zero that depends on nothing would land on one device.
    never = lax.optimization_barrier(False)
    return jnp.where(never, cast(leaf, dtype), jnp.zeros_like(leaf, dtype=dtype))


def _real(leaf: Any) -> Any:
    return _checks.real_dtype(leaf.dtype)


def _weight_dtype(tree: PyTree) -> Any:
    """The dtype of a weight over all of ``tree``."""
    return _checks.wide_dtype(*(_real(leaf) for leaf in jax.tree.leaves(tree)))
