"""Finds the averages in an optimizer's state, wherever wrappers have put them."""

from typing import Any

import jax
import numpy as np
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
    found = _averages(opt_state, which, _transform.ParamsEmaState, params)
    for path, _, _ in found:
        if _in_lookahead(opt_state, path):
            _checks.fast_parameters(path, _OUTSIDE)
    result, covered = params, set()
    for _, node, _ in found:
        mine = _covers(node.ema, params)
        if mine & covered:
            _checks.ambiguous([line for _, _, line in found])
        covered |= mine
        result = _state.corrected(node.ema, like=result)
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
    found = _averages(opt_state, which, (_transform.ParamsEmaState, _state.EmaState))
    if len(found) > 1:
        _checks.ambiguous([line for _, _, line in found])
    state = found[0][1]
    return state.ema if isinstance(state, _transform.ParamsEmaState) else state


def _averages(
    opt_state: Any, which: Any, kinds: Any, params: Any = None
) -> list[tuple[Any, Any, str]]:
    """Path, node and description of the averages ``which`` chooses of some kinds."""
    known = (_transform.ParamsEmaState, _state.EmaState)
    every = _nodes(opt_state, known)
    found = [pair for pair in every if isinstance(pair[1], kinds)]
    if not found:
        parameters = kinds is _transform.ParamsEmaState
        swapped = bool(_nodes(params, kinds))
        _checks.none_found(parameters, [_described(*pair) for pair in every], swapped)
    listed = [
        (path, node, f"{index}: {_described(path, node)}")
        for index, (path, node) in enumerate(found)
    ]
    if which is None:
        return listed
    if isinstance(which, (int, np.integer)) and not isinstance(which, bool):
        chosen = listed[which : which + 1] if which >= 0 else []
    else:
        chosen = [entry for entry in listed if which in _names(entry[0])]
    if not chosen:
        _checks.no_such(which, [line for _, _, line in listed])
    return chosen


def _nodes(opt_state: Any, kinds: Any) -> list[tuple[Any, Any]]:
    """The paths and the outermost nodes of some kinds."""
    nodes = jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, kinds)
    )[0]
    return [(path, node) for path, node in nodes if isinstance(node, kinds)]


def _in_lookahead(opt_state: Any, path: Any) -> bool:
    """Whether the average at ``path`` sees the fast parameters of a lookahead only."""
    wrappers = [p for p, _ in _nodes(opt_state, optax.LookaheadState)]
    return any(path[: len(wrapper)] == wrapper for wrapper in wrappers)


def _names(path: Any) -> list[Any]:
    """The names and labels on the way: the keys of dicts."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _described(path: Any, node: Any) -> str:
    """One average in an error: its kind, path and leaves."""
    params = isinstance(node, _transform.ParamsEmaState)
    m = node.ema.m if params else node.m
    leaves = len(jax.tree.leaves(m))
    kind = "params_ema" if params else "ema"
    return (
        f"{kind} {_checks.where(path)}, {leaves} {'leaf' if leaves == 1 else 'leaves'}"
    )


def _covers(average: _state.EmaState, params: PyTree) -> set[int]:
    """The numbers of the leaves of ``params`` that ``average`` has."""
    leaves, treedef = jax.tree.flatten(params)
    numbers = treedef.unflatten(range(len(leaves)))
    _checks.matched("params", average.m, params, rule="read", advice=_DIFFERS)
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
_DIFFERS = (
    "The average in an nnx.Optimizer is read by emaopt.nnx.eval_model(optimizer, "
    f"model). {_OUTSIDE}"
)
