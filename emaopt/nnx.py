"""The average of a model's Variables in a training loop with ``flax.nnx``.

Three lines of a training loop change::

    ema = emaopt.nnx.EMA(model, 0.999)  # 1, before the training
    ema.update(model)  # 2, after each optimizer.update
    averaged = ema.apply_to(model)  # 3, to evaluate

or, with the average inside the optimizer, where it counts only the steps that are
really taken::

    tx = optax.chain(tx, emaopt.params_ema(0.999))
    averaged = emaopt.nnx.eval_model(optimizer, model)

Checkpoints. ``nnx.state(ema)`` is an ``nnx.State`` like that of a model: save it, and
give what is restored to ``nnx.update(ema, restored)``; a resumed run equals an unbroken
one bit for bit. What is restored is checked against the model when it is used: to keep
the running average where a checkpoint may not fit, restore into a copy, and look:

>>> import emaopt.nnx
>>> from flax import nnx
>>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
>>> ema = emaopt.nnx.EMA(model, 0.9)
>>> restored = nnx.state(emaopt.nnx.EMA(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), 0.9))
>>> candidate = nnx.clone(ema)
>>> nnx.update(candidate, restored)
>>> candidate.apply_to(model)
Traceback (most recent call last):
    ...
AssertionError: ...[model at ['bias']: found shape (3,), expected (4,). ...

To start an average on a checkpoint that was written without one, restore the model and
make the average of it, with ``warm_start=True`` if it shall begin with those
parameters. Inside an optimizer, restore the old one and hand its state on:

>>> import optax
>>> adam = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)  # restored
>>> tx = optax.chain(optax.adam(1e-3), emaopt.params_ema(0.999))
>>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
>>> nnx.update(optimizer.opt_state[0], nnx.state(adam.opt_state))

To go on with the average of a ``flax.nnx.EMA``, start from its model, at full weight:
``emaopt.nnx.EMA(old.apply_to(model), 0.999, warm_start=True)``.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emaopt import _checks, _decay, _flax, _lookup, _state

try:
    from flax import nnx
except ImportError as error:
    _checks.flax_missing("emaopt.nnx", error)

PyTree = Any


class EmaVariable(nnx.Variable):
    """A Variable of the state of an average; no filter for parameters selects it."""


class EMA(nnx.Pytree):
    """The exponential moving average of a model's Variables.

    m_t = β·m_{t-1} + (1 − β)·x_t, read as m̂_t = m_t / (1 − Π β_i)

    Args:
      model: an ``nnx.Module``, or any other node of Variables.
      decay: β in [0, 1): a Python float, a NumPy or JAX scalar (traced included), an
        ``optax.Schedule`` of the number of updates so far, or a pytree prefix of the
        averaged Variables (nested dicts) with any of these as leaves.
      only: a Flax filter of the Variables to average. ``...`` is all of them but
        ``BatchStat``, ``Cache`` and ``Intermediate``, of which evaluation has the
        latest. Any other filter is taken at its word:
        ``only=(nnx.Param, nnx.BatchStat)`` averages the statistics too. What is not
        floating-point (RNG keys, counters) is never averaged.
      debias: read m_t / (1 − Π β_i); False reads m_t.
      warm_start: begin with a copy of the values in ``model``, at full weight.
      accumulator_dtype: the dtype of the average, float32 or wider; None for float32,
        or the dtype of the Variable where that is wider.
      compensated: keep what rounding leaves behind too: right to 4 ulp for ever, for
        the memory of the average once more.
      skip_nonfinite: an update with a NaN or an infinity anywhere changes nothing.
      graph: True or False for graph or tree mode in flax >= 0.12; None for the mode
        that is current.

    Attributes:
      average: the ``EmaState``, its arrays in ``EmaVariable``s with the metadata of the
        Variables they average, hooks excepted.

    Raises:
      ValueError: a decay outside [0, 1); ``only`` selects nothing that is
        floating-point; an ``accumulator_dtype`` below float32.
      TypeError: a decay held in a dtype narrower than float32, or a flag no bool.

    It differs from ``flax.nnx.EMA``: that one begins with the parameters (here
    ``warm_start=True``; by default the average begins empty and is corrected for it);
    it takes a constant decay, and accumulates in the dtype of the parameters, where a
    bfloat16 average stalls; it averages batch statistics with the rest, and fails on
    the RNG state of Dropout; and its ``apply_to`` gives a live view that shares its
    Variables and follows its updates, where this one gives a model of its own.

    >>> import emaopt.nnx
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> model = nnx.Param(jnp.float32(1))
    >>> ema = emaopt.nnx.EMA(model, 0.5)
    >>> for value in (1.0, 3.0):
    ...     model[...] = jnp.float32(value)
    ...     ema.update(model)
    >>> print(ema.apply_to(model)[...])
    2.333...
    """

    def __init__(
        self,
        model: Any,
        decay: Any,
        *,
        only: Any = ...,
        debias: bool = True,
        warm_start: bool = False,
        accumulator_dtype: Any = None,
        compensated: bool = False,
        skip_nonfinite: bool = False,
        graph: bool | None = None,
    ):
        _decay.check(decay)
        leaves, self._structure = jax.tree.flatten(decay, is_leaf=callable)
        known = [callable(leaf) or _flax.known(leaf) for leaf in leaves]
        # Static attributes must be hashable, arrays are data.
        self._known = tuple(
            (leaf if callable(leaf) else float(leaf)) if static else None
            for leaf, static in zip(leaves, known, strict=True)
        )
        self._traced = nnx.data(
            [
                EmaVariable(jnp.asarray(leaf))
                for leaf, static in zip(leaves, known, strict=True)
                if not static
            ]
        )
        self.only = only
        self.debias = _checks.flag("debias", debias)
        self.skip_nonfinite = _checks.flag("skip_nonfinite", skip_nonfinite)
        self.graph = graph
        variables = _named(_split(model, self._filter(), graph)[1])
        values = _flax.averaged(_pure(variables))
        if not jax.tree.leaves(values):
            _checks.none_selected(only)
        state = _state.init(
            values,
            decay=decay,
            accumulator_dtype=accumulator_dtype,
            compensated=compensated,
            warm_start=warm_start,
        )
        self.average = nnx.data(_in_variables(state, variables))

    @property
    def decay(self) -> PyTree:
        """The decay, as it was given."""
        traced = iter(self._traced)
        leaves = [_pure(next(traced)) if leaf is None else leaf for leaf in self._known]
        return jax.tree.unflatten(self._structure, leaves)

    def update(self, model: Any) -> None:
        """Absorbs the Variables of ``model`` as they are now.

        Args:
          model: the model, structured as the one this average was made of.

        Raises:
          AssertionError: structure, shape or dtype of a Variable do not fit; the
            message names it, and the average stays as it was.

        >>> import emaopt.nnx
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> ema = emaopt.nnx.EMA(model, 0.9)
        >>> ema.update(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
        Traceback (most recent call last):
            ...
        AssertionError: ...[model at ['bias']: found shape (4,), expected (3,). ...
        """
        state = _pure(self.average)
        values = _pure(_named(_split(model, self._filter(), self.graph)[1]))
        new = _flax.absorb("model", state, values, self.decay, self.skip_nonfinite)
        variables = jax.tree.leaves(self.average, is_leaf=_is_variable)
        for variable, array in zip(variables, jax.tree.leaves(new), strict=True):
            variable.copy_from(_with_value(variable, array))

    def apply_to(self, model: Any) -> Any:
        """A model for evaluation, with the averages in place of the Variables.

        Args:
          model: the model, structured as the one this average was made of; it is left
            as it is.

        Returns:
          A model that shares no Variable and no buffer with ``model`` or the average:
          the averages in the dtypes of ``model`` (before the first update its values),
          and of all other Variables a copy of the latest. Metadata, sharding and mode
          are those of ``model``: call ``.eval()`` on it where ``model`` is in training.
          Inside ``nnx.jit`` the copies cost nothing.

        Raises:
          AssertionError: the average does not fit ``model``, such as one restored from
            the checkpoint of another model; the message names the Variable.
        """
        graphdef, chosen, rest = _split(model, self._filter(), self.graph)
        values = _pure(_named(chosen))
        state = _pure(self.average)
        _checks.matched("model", state.m, values, rule="read")
        averages = _state.corrected(
            state if self.debias else _of_full_weight(state), like=values
        )
        return _merge(graphdef, chosen, averages, rest)

    def _filter(self) -> Any:
        seen = (nnx.BatchStat, nnx.Cache, nnx.Intermediate)
        return nnx.Not(nnx.Any(*seen)) if self.only is ... else self.only


def eval_model(optimizer: nnx.Optimizer, model: Any, *, which: Any = None) -> Any:
    """A model for evaluation, with the averages inside ``optimizer``.

    m̂ = m / (1 − Π β_i), of the ``params_ema`` in ``optimizer.opt_state``

    Args:
      optimizer: an ``nnx.Optimizer`` whose transformation has ``params_ema`` in it.
      model: the model it optimizes; it is left as it is.
      which: where there are several averages, the one to take; see ``eval_params``.

    Returns:
      A model that shares no Variable and no buffer with ``model``: the averages in the
      dtypes of ``model``, and of all other Variables a copy of the latest. Metadata,
      sharding and mode are those of ``model``: call ``.eval()`` on it where ``model``
      is in training.

    Raises:
      LookupError: no average of parameters, or several and no ``which``.
      AssertionError: the average does not fit ``model``.
      TypeError: ``optimizer`` is no ``nnx.Optimizer``.

    >>> import emaopt.nnx
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import optax
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> tx = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> for _ in range(2):
    ...     grads = nnx.grad(lambda model: -model(jnp.ones(1)).sum())(model)
    ...     _ = optimizer.update(model, grads)
    >>> print(emaopt.nnx.eval_model(optimizer, model).bias[...])
    [1.666...]
    """
    _checks.nnx_optimizer(optimizer, nnx.Optimizer)
    graph = getattr(optimizer, "graph", None)
    graphdef, chosen, rest = _split(model, optimizer.wrt, graph)
    params = _pure(chosen)
    averages = _lookup.eval_params(_pure(optimizer.opt_state), params, which=which)
    return _merge(graphdef, chosen, averages, rest)


def update_batch_stats(
    apply: Callable[[Any, Any], Any],
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    progress: bool = True,
) -> None:
    """Recomputes the statistics of every BatchNorm, for averaged parameters.

    mean = 1/n · Σ_i mean of batch i, var = 1/n · Σ_i variance of batch i

    Args:
      apply: called as ``apply(model, batch)``; what it returns is not used. It is
        compiled here; do not jit it. BatchNorm normalises with the statistics of the
        batch meanwhile, whatever its mode; Dropout stays in the mode it is in.
      model: the model with the averaged parameters, such as ``ema.apply_to(model)``.
        The statistics of its ``nnx.BatchNorm``s change, nothing else.
      batches: an iterable of whatever ``apply`` takes as its batch. Each counts alike,
        whatever its size.
      progress: draw a progress bar where the run takes more than two seconds, and tqdm
        is installed.

    Raises:
      ValueError: no batches, or no ``nnx.BatchNorm`` in ``model``.

    The procedure is that of stochastic weight averaging (Izmailov et al., 2018), known
    as ``torch.optim.swa_utils.update_bn``.

    >>> import emaopt.nnx
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[4.0], [4.0]])]
    >>> emaopt.nnx.update_batch_stats(lambda model, x: model(x), model, batches)
    >>> print(model.mean[...], model.var[...])
    [3.] [0.5]
    """
    scratch = nnx.clone(model)
    for norm in _norms(scratch):
        norm.use_running_average, norm.momentum = False, 0.0
        # A momentum of 0 would still pass on what is not finite.
        norm.mean[...] = jnp.zeros_like(norm.mean[...])
        norm.var[...] = jnp.zeros_like(norm.var[...])
    if not _norms(scratch):
        _checks.no_batch_norm("flax.nnx.BatchNorm", "model has")
    graphdef, rngs, rest = nnx.split(scratch, nnx.RngState, ...)
    static = apply, graphdef
    stats = _flax.mean_over(batches, _statistics, static, rest, rngs, progress)
    for norm, (mean, var) in zip(_norms(model), stats, strict=True):
        norm.mean[...], norm.var[...] = mean, var


def _statistics(static: Any, rest: Any, rngs: Any, batch: Any) -> tuple[PyTree, Any]:
    """The statistics of one batch, and the RNG state after it."""
    apply, graphdef = static
    model = nnx.merge(graphdef, rngs, rest, copy=True)
    apply(model, batch)
    stats = [(norm.mean[...], norm.var[...]) for norm in _norms(model)]
    return stats, nnx.state(model, nnx.RngState)


def _norms(model: nnx.Module) -> list[nnx.BatchNorm]:
    nodes = [node for _, node in nnx.iter_graph(model)]
    return [node for node in nodes if isinstance(node, nnx.BatchNorm)]


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _pure(tree: PyTree) -> PyTree:
    """``tree`` with what is in its Variables in their place, hooks passed over."""
    return jax.tree.map(
        lambda node: _inside(node) if _is_variable(node) else node,
        tree,
        is_leaf=_is_variable,
    )


def _inside(variable: nnx.Variable) -> PyTree:
    return jax.tree.leaves(variable, is_leaf=lambda node: node is not variable)[0]


def _with_value(variable: nnx.Variable, value: Any) -> nnx.Variable:
    """A Variable like ``variable``, metadata included, with another value in it."""
    return jax.tree.unflatten(jax.tree.structure(variable), [value])


def _of_full_weight(state: _state.EmaState) -> _state.EmaState:
    """``state`` with weight 1 where anything was observed: m is read as it is."""
    ones = jax.tree.map(lambda w: (w != 0).astype(w.dtype), state.weight)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    residual = state.residual._replace(of_weight=zeros)
    return state._replace(weight=ones, residual=residual)


def _split(model: Any, chosen: Any, graph: bool | None) -> tuple[Any, nnx.State, Any]:
    """The graph of ``model``, its ``chosen`` Variables, and the rest."""
    mode: Any = {} if graph is None else {"graph": graph}
    parts: Any = nnx.split(model, chosen, ..., **mode)
    return parts


def _named(state: Any) -> PyTree:
    """The Variables of ``state`` in nested dicts, whose paths errors name."""
    if isinstance(state, Mapping):
        return {key: _named(part) for key, part in state.items()}
    return state


def _merge(graphdef: Any, chosen: nnx.State, averages: PyTree, rest: Any) -> Any:
    """A new model, of averages and copies."""
    leaves, treedef = jax.tree.flatten(chosen)
    new = [
        _copy(leaf) if average is leaf else average
        for average, leaf in zip(jax.tree.leaves(averages), leaves, strict=True)
    ]
    return nnx.merge(graphdef, treedef.unflatten(new), jax.tree.map(_copy, rest))


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _in_variables(state: _state.EmaState, variables: PyTree) -> _state.EmaState:
    """``state`` with each of its arrays in an ``EmaVariable``."""

    def beside(variable: nnx.Variable, part: PyTree) -> PyTree:
        metadata = {
            name: value
            for name, value in variable.get_metadata().items()
            if not name.startswith("on_")
        }
        return jax.tree.map(lambda array: EmaVariable(array, **metadata), part)

    def like_model(tree: PyTree) -> PyTree:
        return jax.tree.map(beside, variables, tree, is_leaf=_is_variable)

    alone = jax.tree.map(
        EmaVariable, state._replace(m=None, residual=state.residual._replace(of_m=None))
    )
    m = state.residual.of_m
    residual = alone.residual._replace(of_m=None if m is None else like_model(m))
    return alone._replace(m=like_model(state.m), residual=residual)
