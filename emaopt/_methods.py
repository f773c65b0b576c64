"""The ways to run along time: in order, by merging, in blocks, sharded."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from emaopt import _arithmetic, _checks, _decay, _state


class Inputs(NamedTuple):
    """What changes from step to step: arrays with a leading time axis, or None."""

    values: Sequence[Any]  # for each leaf of state.m
    rates: Sequence[_decay.Rate | None]  # for each weight; None where constant
    masks: Sequence[Any] | None  # for each weight, bool
    counted: Any  # bool (T,), False where nothing happens; None without masks
    reset: Any  # bool (T,)


class Problem(NamedTuple):
    """A checked call of ``scan``, in lists of one entry for each leaf or weight."""

    inputs: Inputs
    rates: Sequence[Any]  # for each weight a Rate; None where it is not constant
    steps: int
    hold: bool
    reverse: bool

    @property
    def plain(self) -> bool:
        """Whether nothing but the values changes from step to step."""
        _, *rest = self.inputs
        return not jax.tree.leaves(rest)

    def step(self, state: _state.EmaState, now: Inputs) -> _state.EmaState:
        """The state after one step."""
        if now.reset is not None:
            state = _state.forget(state, now.reset)
        rates: list[Any] = [a or b for a, b in zip(self.rates, now.rates, strict=True)]
        counted = True if now.counted is None else now.counted
        return _state.step(
            state, now.values, rates, now.masks, hold=self.hold, counted=counted
        )


Outcome = tuple[_state.EmaState, list[jax.Array]]


def sequential(state: _state.EmaState, problem: Problem) -> Outcome:
    """One ``lax.scan`` over the steps, compensated."""
    if problem.steps == 1:
        run = _first_of_two if problem.inputs.masks is None else _one_and_none
        final, averages = run(state, problem)
        return final, [average[:1] for average in averages]

    def body(carry: _state.EmaState, now: Inputs) -> Any:
        carry = problem.step(carry, now)
        return carry, _averages(carry, problem)

    return lax.scan(
        body, state, problem.inputs, length=problem.steps, reverse=problem.reverse
    )


def _first_of_two(state: _state.EmaState, problem: Problem) -> Outcome:
    """One step, done twice.

    A loop of one step is none to the compiler, which then contracts other products
    into multiply-adds: the last bits would depend on how a sequence is split.
    """

    def body(carry: Any, now: Inputs) -> Any:
        state, _ = carry
        after = problem.step(state, now)
        return (after, state), _averages(after, problem)

    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), problem.inputs)
    twice = lax.optimization_barrier(twice)
    (_, after), averages = lax.scan(body, (state, state), twice, length=2)
    return after, averages


def _one_and_none(state: _state.EmaState, problem: Problem) -> Outcome:
    """One step and one that is not there, for the same reason."""
    never = jax.tree.map(jnp.zeros_like, problem.inputs)
    never = never._replace(values=problem.inputs.values, rates=problem.inputs.rates)
    both = jax.tree.map(lambda *x: jnp.concatenate(x), problem.inputs, never)
    both = lax.optimization_barrier(both)
    return sequential(state, problem._replace(inputs=both, steps=2, reverse=False))


def associative(state: _state.EmaState, problem: Problem) -> Outcome:
    """``lax.associative_scan`` over the steps, each as what it does to a state."""
    if not problem.steps:
        return sequential(state, problem)
    masks, counted = problem.inputs.masks, problem.inputs.counted
    gaps = masks is not None and not problem.hold
    folded = problem.plain and all(rate.static for rate in problem.rates)
    owners = _state.owners_of(state)

    def compose(earlier: _arithmetic.Span, later: _arithmetic.Span) -> _arithmetic.Span:
        return kept(_arithmetic.compose(owners, gaps, earlier, later))

    def kept(spans: _arithmetic.Span) -> _arithmetic.Span:
        # Else each level would be computed anew in those that follow. Of decays that
        # are known, all but the values is folded into constants.
        return spans if folded else lax.optimization_barrier(spans)

    spans = kept(_spans(state, problem))
    spans = lax.associative_scan(compose, spans, reverse=problem.reverse)
    ms, weights, *_ = _state.parts(state)
    start = _arithmetic.Span(
        *jax.tree.map(lambda leaf: leaf[None], (ms, weights)),
        decays=[jnp.ones_like(p[:1]) for p in spans.decays],
        lows=[jnp.zeros_like(p[:1]) for p in spans.decays],
    )
    after = compose(start, spans)
    averages = [
        _output(m, after.weights[owner], x)
        for m, owner, x in zip(after.ms, owners, problem.inputs.values, strict=True)
    ]
    last = jax.tree.map(lambda leaf: leaf[0 if problem.reverse else -1], spans)
    empty = _state.emptied(state)
    whole = _state.rebuilt(
        empty,
        [*last.ms, *last.weights, *last.decays],
        [*_state.left_behind(empty)[: -len(last.lows)], *last.lows],
        jnp.int32(problem.steps) if counted is None else _number(counted),
    )
    return _state.merge(state, whole), averages


def _spans(state: _state.EmaState, problem: Problem) -> _arithmetic.Span:
    """What each single step does to a state."""
    ms, weights, *_ = _state.parts(state)
    values, varying, masks, _, reset = problem.inputs
    decays, lows, shares = [], [], []
    for owner, weight in enumerate(weights):
        rate = varying[owner] or problem.rates[owner]
        # Of the shape and the sharding of the weight, for each of the steps.
        ones = jnp.ones((problem.steps, *[1] * weight.ndim), weight.dtype)
        ones = ones * jnp.ones_like(weight)[None]

        def in_time(part: Any, axes: int = ones.ndim) -> jax.Array:
            part = jnp.asarray(part)
            rest = axes - part.ndim if part.ndim else 0
            return part.reshape(part.shape + (1,) * rest)

        parts = _decay.two_floats(rate, weight.dtype)
        decay, low, share = (in_time(part) * ones for part in parts)
        if masks is not None:
            mask = in_time(masks[owner])
            share = _arithmetic.where(mask, share, 0)
            if problem.hold:
                decay, low = (
                    _arithmetic.where(mask, *pair) for pair in ((decay, 1), (low, 0))
                )
            else:
                decay = _arithmetic.above_zero(~mask, decay)
        if reset is not None:
            kept = in_time(~reset)
            decay, low = (_arithmetic.where(kept, part, 0) for part in (decay, low))
        decays.append(decay)
        lows.append(low)
        shares.append(share)
    xs = [
        _arithmetic.scaled(shares[owner], _arithmetic.cast(jnp.asarray(x), m.dtype))
        for owner, x, m in zip(_state.owners_of(state), values, ms, strict=True)
    ]
    return _arithmetic.Span(xs, shares, decays, lows)


def blocked(state: _state.EmaState, problem: Problem) -> Outcome:
    """Blocks by one triangular product each, and a compensated scan over the blocks."""
    size = block_size(problem, state) or 16
    count = problem.steps // size
    ms, *_ = _state.parts(state)
    # What is sharded by its type cannot be flattened.
    split = any(any(jax.typeof(m).sharding.spec) for m in ms)
    if not count or not ms or split:
        return sequential(state, problem)
    whole = count * size
    values = problem.inputs.values
    if problem.reverse:
        values = [jnp.flip(x, 0) for x in values]

    def part(start: int, stop: int) -> Problem:
        inputs = problem.inputs._replace(values=[x[start:stop] for x in values])
        return problem._replace(inputs=inputs, steps=stop - start, reverse=False)

    # A trailing axis of one element would keep the compiler from using vectors.
    shapes = [(count, size, *[m.size] * (m.size != 1)) for m in ms]
    blocks = [
        _arithmetic.cast(jnp.asarray(x[:whole]), m.dtype).reshape(shape)
        for x, m, shape in zip(values, ms, shapes, strict=True)
    ]

    def in_order(state: _state.EmaState) -> Outcome:
        final, averages = sequential(state, part(0, whole))
        pairs = zip(averages, ms, strict=True)
        return final, [_arithmetic.cast(a, m.dtype).ravel() for a, m in pairs]

    final, averages = _state.blocks(state, blocks, problem.rates, in_order)
    averages = [
        _arithmetic.cast(a, _checks.output_dtype(x)).reshape(whole, *m.shape)
        for a, x, m in zip(averages, values, ms, strict=True)
    ]
    if whole < problem.steps:
        final, tail = sequential(final, part(whole, problem.steps))
        averages = [jnp.concatenate(both) for both in zip(averages, tail, strict=True)]
    if problem.reverse:
        averages = [jnp.flip(a, 0) for a in averages]
    return final, averages


def sharded(
    state: _state.EmaState, problem: Problem, axes: Sequence[str], run: Callable
) -> Outcome:
    """``run`` on the time shard of this device, begun where the shards before end."""
    state = alike(state, problem, without=axes)
    mine, _ = run(vary_over(_state.emptied(state), axes), problem)
    shards = _gather(mine, axes)

    def merge(before: _state.EmaState, shard: _state.EmaState) -> Any:
        return _state.merge(before, shard), before

    final, starts = lax.scan(merge, state, shards, reverse=problem.reverse)
    index = lax.axis_index(axes)
    start = jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), starts
    )
    return final, run(start, problem)[1]


def alike(
    state: _state.EmaState, problem: Problem, without: Sequence[str] = ()
) -> _state.EmaState:
    """``state``, each part typed to vary over the mesh axes of what enters it."""
    values, rates, masks, counted, reset = problem.inputs
    ms, weights, powers, _, _ = _state.parts(state)
    left = _state.left_behind(state)
    masks = [None] * len(weights) if masks is None else masks
    own = list(zip(weights, powers, problem.rates, rates, masks, strict=True))
    owners = zip(_state.owners_of(state), values, strict=True)
    sources = [*((own[owner], x) for owner, x in owners), *own, *own]
    new, residuals = [], []
    for leaf, rest, source in zip([*ms, *weights, *powers], left, sources, strict=True):
        axes = axes_of((leaf, rest, source, reset)) - set(without)
        new.append(vary_over(leaf, axes))
        residuals.append(vary_over(rest, axes))
    count = vary_over(state.count, axes_of(counted) - set(without))
    return _state.rebuilt(state, new, residuals, count)


def counts(
    state: _state.EmaState,
    steps: int,
    counted: Any,
    axes: Sequence[str],
    *,
    reverse: bool,
) -> jax.Array:
    """The count before each of the steps, which is what schedules are called with."""
    one = jnp.ones(steps, jnp.int32) if counted is None else counted.astype(jnp.int32)
    before = lax.cumsum(one, reverse=reverse) - one
    if axes:
        shard, shards = lax.axis_index(axes), np.arange(lax.axis_size(axes))
        numbers = steps if counted is None else lax.all_gather(_number(one), axes)
        elsewhere = shards > shard if reverse else shards < shard
        before = before + jnp.sum(jnp.where(elsewhere, numbers, 0), dtype=jnp.int32)
    return _state.total(state.count, before)


def _number(counted: jax.Array) -> jax.Array:
    return jnp.sum(counted, dtype=jnp.int32)


def axes_of(tree: Any) -> frozenset[str]:
    """The axes of a mesh, inside ``shard_map``, that any leaf varies over."""

    def axes(leaf: Any) -> frozenset[str]:
        kind = jax.typeof(leaf)
        return kind.vma if hasattr(kind, "vma") else kind.mat.varying  # jax 0.9 on

    return frozenset().union(*map(axes, jax.tree.leaves(tree)))


def vary_over(tree: Any, axes: Any) -> Any:
    """``tree``, typed to vary over ``axes`` too."""

    def vary(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(set(axes) - axes_of(leaf)))
        if not missing:
            return leaf
        pvary = getattr(lax, "pvary", None)  # jax 0.8
        if pvary is not None:
            return pvary(leaf, missing)
        return lax.pcast(leaf, missing, to="varying")

    return jax.tree.map(vary, tree)


def _gather(state: _state.EmaState, axes: Sequence[str]) -> _state.EmaState:
    """The states of all shards, replicated, by one collective for all leaves.

    Leaves of another dtype, or that vary over other mesh axes too, are of another
    type, and need one of their own.
    """
    # In two floats: one would lose digits of a large count.
    counts = [x.astype(jnp.float32) for x in (state.count >> 12, state.count & 0xFFF)]
    leaves, treedef = jax.tree.flatten((state._replace(count=None), counts))
    if _may_be_sharded():
        rows = [_summed_rows(leaf, axes) for leaf in leaves]
    else:
        rows = list(leaves)
        kinds = [(leaf.dtype, axes_of(leaf) - set(axes)) for leaf in leaves]
        for kind in dict.fromkeys(kinds):
            chosen = [index for index, other in enumerate(kinds) if other == kind]
            ends = np.cumsum([leaves[index].size for index in chosen])
            flat = jnp.concatenate([leaves[index].ravel() for index in chosen])
            flat = _gathered_rows(flat, axes)
            for index, end in zip(chosen, ends, strict=True):
                leaf = leaves[index]
                row = lax.slice_in_dim(flat, end - leaf.size, end, axis=1)
                rows[index] = row.reshape(-1, *leaf.shape)
    states, (high, low) = treedef.unflatten(rows)
    count = (high.astype(jnp.int32) << 12) + low.astype(jnp.int32)
    return states._replace(count=count)


def _may_be_sharded() -> bool:
    """Whether the compiler may shard over axes of the mesh that are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind != AxisType.Manual and size > 1 for kind, size in kinds)


def _gathered_rows(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """``x`` of every shard, replicated."""
    if jax.__version_info__ < (0, 10):  # a gather there has the type of what varies
        return _summed_rows(x, axes)
    return lax.all_gather(x, axes, to="invarying")


def _summed_rows(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """``x`` of every shard, replicated: a sum in which all but one are zeros.

    Of an array that is sharded over another axis of the mesh too, the compiler sums
    the parts where they are; for a gather, it would bring them together before.
    """
    rows = jnp.stack([jnp.zeros_like(x)] * lax.axis_size(axes))
    rows = lax.dynamic_update_index_in_dim(rows, x, lax.axis_index(axes), 0)
    return lax.psum(rows, axes)


def block_size(problem: Problem, state: _state.EmaState) -> int:
    """The steps in a block: 32 for narrow leaves, 16 for wider ones, 0 for wide."""
    widest = max((math.prod(m.shape) for m in _state.parts(state)[0]), default=0)
    return 32 if widest <= 2 else 16 if widest <= 8 else 0


def _averages(state: _state.EmaState, problem: Problem) -> list[jax.Array]:
    """The corrected averages, in the dtypes of the values."""
    ms, weights, *_ = _state.parts(state)
    owners, values = _state.owners_of(state), problem.inputs.values
    return [
        _output(m, weights[owner], x)
        for m, owner, x in zip(ms, owners, values, strict=True)
    ]


def _output(m: jax.Array, weight: jax.Array, x: Any) -> jax.Array:
    weight = weight.reshape(weight.shape + (1,) * (m.ndim - weight.ndim))
    return _arithmetic.cast(_arithmetic.ratio(m, weight), _checks.output_dtype(x))
