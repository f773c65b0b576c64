"""What both Flax adapters share; it does not import Flax."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax

from emaopt import _checks, _state, schedules

PyTree = Any


def averaged(tree: PyTree) -> PyTree:
    """``tree`` with MaskedNode where a leaf is not floating-point."""
    return jax.tree.map(
        lambda leaf: leaf if _checks.is_inexact(leaf) else optax.MaskedNode(), tree
    )


def mean_over(
    batches: Iterable[Any],
    statistics: Callable[[Any, Any], tuple[PyTree, Any]],
    carry: Any,
    progress: bool,
) -> PyTree:
    """The mean over ``batches`` of the statistics of each.

    ``statistics(carry, batch)`` returns those of a batch and the carry for the next;
    it is compiled once for each shape of a batch.
    """
    _checks.flag("progress", progress)
    decay = schedules.uniform()

    @jax.jit
    def absorb(mean: _state.EmaState, carry: Any, batch: Any) -> tuple[Any, Any]:
        stats, carry = statistics(carry, batch)
        return _state.update(mean, stats, decay), carry

    mean = like = None
    for batch in _bar(batches) if progress else batches:
        if mean is None:
            like = jax.eval_shape(statistics, carry, batch)[0]
            mean = _state.init(like, compensated=True)
        mean, carry = absorb(mean, carry, batch)
    if mean is None:
        _checks.no_batches()
    return jax.tree.map(
        lambda average, leaf: average.astype(leaf.dtype), _state.corrected(mean), like
    )


def _bar(batches: Iterable[Any]) -> Iterable[Any]:
    """``batches`` with a bar once they take a while, where tqdm is there to draw it."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc="batch statistics", unit="batch", delay=2.0)
