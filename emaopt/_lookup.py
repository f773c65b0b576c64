"""Finds the averages in an optimizer's state, wherever wrappers have put them."""

from typing import Any

import jax
import optax

from emaopt import _checks, _state, _transform

PyTree = Any


def eval_params(
    opt_state: optax.OptState, params: optax.Params, *, which: Any = None
) -> optax.Params:
    """The averaged parameters, ready for evaluation.

    m̂ = m / (1 − Π β_i), of the ``params_ema`` in ``opt_state``

    Args:
      opt_state: the state of an optimizer with a ``params_ema`` anywhere in it: inside
        ``chain``, ``named_chain``, ``masked``, ``partition``, ``MultiSteps``,
        ``apply_if_finite``, ``inject_hyperparams`` and the like, at any depth.
      params: the current parameters; they give the structure and the dtypes.
      which: where two averages cover one leaf, the one to take: an index in the order
        found, or a name of ``optax.named_chain`` or a label of ``optax.partition`` on
        the way to it.

    Returns:
      A tree like ``params``, in its dtypes. Leaves that are not averaged are those of
      ``params``, and before the first absorption all are. Averages over disjoint leaves
      (``partition``) are combined.

    Raises:
      LookupError: no average of parameters, or several for one leaf and no ``which``;
        the message lists what is where.
      AssertionError: the average does not fit ``params``.

    The correction is that of Adam (Kingma and Ba, 2015).

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> import optax
    >>> optimizer = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.9))
    >>> params = jnp.float32(5)
    >>> state = optimizer.init(params)
    >>> print(emaopt.eval_params(state, params))
    5.0
    >>> updates, state = optimizer.update(jnp.float32(1), state, params)
    >>> print(emaopt.eval_params(state, params))
    4.0
    """
    found = _averages(opt_state, which, _transform.ParamsEmaState)
    averages = [node.ema for _, node in found]
    result, covered = params, set()
    for average in averages:
        mine = _covers(average, params)
        if mine & covered:
            _checks.ambiguous(_listed(found))
        covered |= mine
        result = _state.corrected(average, like=result)
    return result


def find_state(opt_state: optax.OptState, which: Any = None) -> _state.EmaState:
    """The raw state of the one average in an optimizer's state.

    (m, βᵗ, w, count), as ``update`` left them

    Args:
      opt_state: the state of an optimizer with a ``params_ema`` or an ``ema`` in it.
      which: where there are several, the one to take: an index in the order found, or
        a name of ``optax.named_chain`` or a label of ``optax.partition`` on the way.

    Returns:
      The ``EmaState`` itself, no copy.

    Raises:
      LookupError: none found, or several and no ``which`` to tell them apart; the
        message lists what is where.

    The counterpart of ``optax.tree.get``, which finds a field by its name.

    >>> import emaopt
    >>> import jax.numpy as jnp
    >>> import optax
    >>> optimizer = optax.chain(emaopt.ema(0.9), optax.sgd(0.1))
    >>> state = optimizer.init(jnp.ones(2))
    >>> print(emaopt.find_state(state).count)
    0
    """
    kinds = (_transform.ParamsEmaState, _state.EmaState)
    found = _averages(opt_state, which, kinds)
    if len(found) > 1:
        _checks.ambiguous(_listed(found))
    state = found[0][1]
    return state.ema if isinstance(state, _transform.ParamsEmaState) else state


def _averages(opt_state: Any, which: Any, kinds: Any) -> list[tuple[Any, Any]]:
    """The averages of the given kinds with their paths, as ``which`` chooses."""
    known = (_transform.ParamsEmaState, _state.EmaState)
    nodes = jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, known)
    )[0]
    every = [(path, node) for path, node in nodes if isinstance(node, known)]
    found = [(path, node) for path, node in every if isinstance(node, kinds)]
    if not found:
        _checks.none_found(kinds is _transform.ParamsEmaState, _listed(every))
    if which is None:
        return found
    if isinstance(which, int) and not isinstance(which, bool):
        chosen = found[which : which + 1] if which >= 0 else []
    else:
        chosen = [pair for pair in found if which in _names(pair[0])]
    if not chosen:
        _checks.no_such(which, _listed(found))
    return chosen


def _names(path: Any) -> list[Any]:
    """The names and labels on the way: the keys of dicts."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _listed(found: list[tuple[Any, Any]]) -> list[str]:
    """One line for each average: its index, kind, path and leaves."""
    lines = []
    for index, (path, node) in enumerate(found):
        params = isinstance(node, _transform.ParamsEmaState)
        m = node.ema.m if params else node.m
        lines.append(
            f"{index}: {'params_ema' if params else 'ema'} "
            f"{_checks.where(path)}, {len(jax.tree.leaves(m))} leaves"
        )
    return lines


def _covers(average: _state.EmaState, params: PyTree) -> set[int]:
    """The numbers of the leaves of ``params`` that ``average`` has."""
    leaves, treedef = jax.tree.flatten(params)
    numbers = treedef.unflatten(range(len(leaves)))
    _checks.matched("params", average.m, params, rule="read", advice=_OUTSIDE)
    mine = jax.tree.map(
        lambda m, number: () if _checks.is_masked(m) else (number,),
        average.m,
        numbers,
        is_leaf=_checks.is_masked,
    )
    return set(jax.tree.leaves(mine))


_OUTSIDE = (
    "A wrapper that changes the structure of the parameters (optax.flatten, "
    "optax.lookahead, split_real_and_imaginary) belongs inside the chain that "
    "params_ema ends: chain(wrapper(...), params_ema(...))."
)
