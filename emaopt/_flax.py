"""What both Flax adapters share; it does not import Flax."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from emaopt import _checks, _decay, _state, schedules

PyTree = Any


def averaged(tree: PyTree) -> PyTree:
    """``tree`` with MaskedNode where a leaf is not floating-point."""
    return jax.tree.map(
        lambda leaf: leaf if _checks.is_inexact(leaf) else optax.MaskedNode(), tree
    )


def known(leaf: Any) -> bool:
    """Whether the value of one decay is known while tracing."""
    return _checks.concrete(leaf) and np.ndim(leaf) == 0


def static_decay(name: str, decay: Any) -> Any:
    """A decay that can be compared by its value: a Python float or a schedule."""
    _decay.check(decay, name)
    if callable(decay):
        return decay
    if _decay.is_tree(decay) or not known(decay):
        _checks.not_static(name, decay)
    return float(decay)


def absorb(
    name: str, state: _state.EmaState, tree: PyTree, decay: Any, skip_nonfinite: bool
) -> _state.EmaState:
    """One step; errors call ``tree`` by its ``name``."""
    leaves = _checks.matched(name, state.m, tree)
    observed: Any = True
    if skip_nonfinite:
        finite = [jnp.isfinite(leaf).all() for leaf in leaves]
        observed = jnp.all(jnp.array(finite, bool))
    return _state.update(state, tree, decay, observed=observed)


def mean_over(
    batches: Iterable[Any],
    statistics: Callable[[Any, PyTree, PyTree, Any], tuple[PyTree, PyTree]],
    static: Any,
    fixed: PyTree,
    carry: PyTree,
    progress: bool,
) -> PyTree:
    """The mean over ``batches`` of the statistics of each.

    ``statistics(static, fixed, carry, batch)`` returns those of a batch and the carry
    for the next. It is compiled once for what is static and each shape of a batch.
    """
    _checks.flag("progress", progress)
    mean = like = None
    for batch in _bar(batches) if progress else batches:
        if mean is None:
            call = partial(statistics, static)
            like = jax.eval_shape(call, fixed, carry, batch)[0]
            mean = _state.init(like, compensated=True)
        mean, carry = _one_batch(statistics, static, mean, fixed, carry, batch)
    if mean is None:
        _checks.no_batches()
    return jax.tree.map(
        lambda average, leaf: average.astype(leaf.dtype), _state.corrected(mean), like
    )


@partial(jax.jit, static_argnums=(0, 1))
def _one_batch(
    statistics: Callable,
    static: Any,
    mean: _state.EmaState,
    fixed: PyTree,
    carry: PyTree,
    batch: Any,
) -> tuple[_state.EmaState, PyTree]:
    stats, carry = statistics(static, fixed, carry, batch)
    return _state.update(mean, stats, schedules.uniform()), carry


def _bar(batches: Iterable[Any]) -> Iterable[Any]:
    """``batches`` with a bar once they take a while, where tqdm is there to draw it."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc="batch statistics", unit="batch", delay=2.0, leave=False)
