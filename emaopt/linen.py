"""The average of the parameters in a training loop with ``flax.linen``.

Three lines of a training loop change::

    tx = optax.chain(tx, emaopt.params_ema(0.999))  # 1
    state = emaopt.linen.TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    state = state.apply_gradients(grads=grads, **updates)  # 2
    logits = model.apply(state.eval_variables(), images)  # 3

Checkpoints. All of the state is arrays in named tuples and dicts: Orbax,
``flax.serialization`` and pickle keep it as they keep any optimizer's state, and a
resumed run equals an unbroken one bit for bit. What is restored is checked against the
parameters by the next ``apply_gradients`` or ``eval_variables``: they name the leaf
that does not fit, and leave the state they were given as it was.

To start an average on a checkpoint that was written without one, restore into the old
optimizer, and append the state of the average to the state of the chain:

>>> import emaopt
>>> import jax.numpy as jnp
>>> import optax
>>> params = {"w": jnp.ones(2)}  # restored, and so is adam_state
>>> adam_state = optax.adam(1e-3).init(params)
>>> average = emaopt.params_ema(0.999, warm_start=True)
>>> tx = optax.chain(optax.adam(1e-3), average)
>>> opt_state = (adam_state, average.init(params))
>>> print(emaopt.eval_params(opt_state, params)["w"])
[1. 1.]

To go on with the state of ``optax.ema``, which holds the raw average and a count, give
the weight that belongs to that count (with ``optax.ema(..., debias=False)`` too):

>>> import math
>>> old = optax.ema(0.9).init(params)  # restored
>>> old = old._replace(count=jnp.int32(2), ema={"w": jnp.full(2, 0.19)})
>>> new = emaopt.init(params)
>>> log_power = int(old.count) * math.log(0.9)
>>> new = new._replace(
...     m=old.ema,
...     count=old.count,
...     decay_power=jnp.float32(math.exp(log_power)),
...     weight=jnp.float32(-math.expm1(log_power)),
... )
>>> print(emaopt.corrected(new)["w"])
[1. 1.]
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from emaopt import _checks, _flax, _lookup, _state

try:
    from flax import core, struct
    from flax import linen as nn
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ImportError as error:
    _checks.flax_missing("emaopt.linen", error)

PyTree = Any


class TrainState(train_state.TrainState):
    """A ``TrainState`` with what evaluation on averaged parameters needs.

    m̂ = m / (1 − Π β_i) of the parameters, and of the collections as asked

    Make it with ``create``. A ``flax.training.train_state.TrainState`` in all else; a
    subclass may add fields in the same way.

    Attributes:
      collections: the mutable collections of the model, such as ``batch_stats``, by
        name, each the latest that ``apply_gradients`` was given. They can be read as
        attributes too: ``state.batch_stats``.
      averages: an ``EmaState`` for each collection that is averaged.
      decays: the collections that are averaged, and the decay of each; static.
      skip_nonfinite: whether what is not finite is left out of them; static.

    >>> import emaopt.linen
    >>> import flax.linen as nn
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> model = nn.BatchNorm(use_running_average=False, momentum=0.5)
    >>> x = jnp.array([[1.0], [3.0]])
    >>> state = emaopt.linen.TrainState.create(
    ...     apply_fn=model.apply,
    ...     tx=optax.chain(optax.sgd(0.1), emaopt.params_ema(0.5)),
    ...     average={"batch_stats": 0.9},
    ...     **model.init(jax.random.key(0), x),
    ... )
    >>> def loss_fn(params):
    ...     variables = {"params": params, **state.collections}
    ...     out, updates = state.apply_fn(variables, x, mutable=["batch_stats"])
    ...     return jnp.mean(out), updates
    >>> grads, updates = jax.grad(loss_fn, has_aux=True)(state.params)
    >>> state = state.apply_gradients(grads=grads, **updates)
    >>> print(state.batch_stats["mean"], state.eval_variables()["params"]["bias"])
    [1.] [-0.1]
    """

    collections: dict[str, PyTree]
    averages: dict[str, _state.EmaState]
    decays: tuple[tuple[str, Any], ...] = struct.field(pytree_node=False)
    skip_nonfinite: bool = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable,
        params: PyTree,
        tx: optax.GradientTransformation,
        average: Mapping[str, Any] | None = None,
        skip_nonfinite: bool = False,
        **kwargs: Any,
    ) -> "TrainState":
        """A state at step 0.

        Args:
          apply_fn: usually ``model.apply``.
          params: the parameters.
          tx: an optimizer with ``emaopt.params_ema`` in it, for ``eval_variables``.
          average: the collections to average, and the decay of each, a number in
            [0, 1) or an ``optax.Schedule``: ``{"batch_stats": 0.999}``. Collections
            that are not named are kept as they are last.
          skip_nonfinite: a collection with a NaN or an infinity in it does not enter
            its average. (For the parameters say so to ``params_ema``.)
          **kwargs: the collections by name, and the fields of a subclass.
            ``**model.init(key, x)`` gives the parameters and all collections.

        Raises:
          ValueError: ``average`` names a collection that is not there; a decay out of
            range.
          TypeError: a collection that is no mapping; a decay whose value is not known
            yet, or that is a tree.
        """
        given, rest = cls._sorted(kwargs)
        _checks.known("average", average or {}, given)
        # Static fields are compared by value: no functions made here.
        decays = tuple(
            (name, _flax.static_decay(f"average[{name!r}]", decay))
            for name, decay in (average or {}).items()
        )
        return super().create(
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            collections=given,
            averages={
                name: _state.init(_flax.averaged(given[name])) for name, _ in decays
            },
            decays=decays,
            skip_nonfinite=_checks.flag("skip_nonfinite", skip_nonfinite),
            **rest,
        )

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> "TrainState":
        """The state after one step.

        Args:
          grads: gradients like ``params``.
          **kwargs: collections by name, as ``Module.apply`` with ``mutable`` returns
            them, and fields to replace. A collection left out stays as it is, and its
            average too.

        Returns:
          The new state; the old one stays usable.

        Raises:
          AssertionError: parameters or a collection do not fit their average; the
            message names the leaf.
          ValueError: a collection that ``create`` was not given.
          TypeError: a collection that is no mapping.
        """
        given, rest = self._sorted(kwargs)
        _checks.known("apply_gradients", given, self.collections)
        averages = dict(self.averages)
        for name, decay in self.decays:
            if name in given:
                averages[name] = _flax.absorb(
                    name, averages[name], given[name], decay, self.skip_nonfinite
                )
        rest.setdefault("collections", {**self.collections, **given})
        rest.setdefault("averages", averages)
        return super().apply_gradients(grads=grads, **rest)

    @property
    def variables(self) -> dict[str, PyTree]:
        """The variables of training: the parameters and the latest collections."""
        return {**_as_variables(self.params), **self.collections}

    def eval_variables(self, *, which: Any = None) -> dict[str, PyTree]:
        """The variables of evaluation, as ``apply_fn`` takes them.

        Args:
          which: the average to take where ``tx`` has several; see ``eval_params``.

        Returns:
          A dict of the averaged ``params`` and of all collections: those that are
          averaged as their average, the others as the latest; in the dtypes of the
          model. Before the first step everything is as in ``variables``. What is not
          averaged is no copy: use it before the state is donated to the next step.

        Raises:
          LookupError: no average of the parameters in ``tx``, or several and no
            ``which``.
          AssertionError: an average does not fit, such as one restored from the
            checkpoint of another model; the message names the leaf.
        """
        variables = self.variables
        params = variables["params"]
        averages = {"params": _lookup.eval_params(self.opt_state, params, which=which)}
        for name, state in self.averages.items():
            _checks.matched(name, state.m, self.collections[name], rule="read")
            averages[name] = _state.corrected(state, like=self.collections[name])
        return {**variables, **averages}

    @classmethod
    def _sorted(cls, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Collections, as plain dicts whatever Flax made them, and fields."""
        fields = {field.name for field in dataclasses.fields(cls)}
        rest = {name: kwargs[name] for name in kwargs if name in fields}
        given = {name: kwargs[name] for name in kwargs if name not in fields}
        _checks.collections(given)
        return {name: core.unfreeze(given[name]) for name in given}, rest

    def __getattr__(self, name: str) -> PyTree:
        """The collection ``name``."""
        collections = vars(self).get("collections", {})
        if name not in collections:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", obj=self
            )
        return collections[name]


def update_batch_stats(
    apply: Callable[[Any, Any], tuple[Any, Any]],
    variables: Mapping[str, PyTree],
    batches: Iterable[Any],
    *,
    progress: bool = True,
) -> dict[str, PyTree]:
    """Recomputes the statistics of every BatchNorm, for averaged parameters.

    mean = 1/n · Σ_i mean of batch i, var = 1/n · Σ_i variance of batch i

    Args:
      apply: called as ``apply(variables, batch)``, returns ``(output, updates)``: as
        ``functools.partial(model.apply, mutable=["batch_stats"])`` does, with what else
        the model takes. It is compiled here; do not jit it. BatchNorm normalises with
        the statistics of the batch meanwhile, whatever the model is told; Dropout does
        as it is told.
      variables: ``params`` and ``batch_stats``, such as ``state.eval_variables()``.
      batches: an iterable of whatever ``apply`` takes as its batch. Each counts alike,
        whatever its size.
      progress: draw a progress bar where the run takes more than two seconds, and tqdm
        is installed.

    Returns:
      ``variables`` with the new ``batch_stats``. Leaves there that are no statistics
      of a ``flax.linen.BatchNorm`` stay as they are.

    Raises:
      ValueError: no batches, or no ``flax.linen.BatchNorm`` is run by ``apply``.

    The procedure is that of stochastic weight averaging (Izmailov et al., 2018), known
    as ``torch.optim.swa_utils.update_bn``.

    >>> import functools
    >>> import emaopt.linen
    >>> import flax.linen as nn
    >>> import jax
    >>> import jax.numpy as jnp
    >>> model = nn.BatchNorm(use_running_average=True)
    >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[4.0], [4.0]])]
    >>> variables = model.init(jax.random.key(0), batches[0])
    >>> apply = functools.partial(model.apply, mutable=["batch_stats"])
    >>> variables = emaopt.linen.update_batch_stats(apply, variables, batches)
    >>> stats = variables["batch_stats"]
    >>> print(stats["mean"], stats["var"])
    [3.] [0.5]
    """
    variables = dict(variables)
    mean = _flax.mean_over(batches, _statistics, apply, variables, None, progress)
    stats = _state.filled(mean, variables["batch_stats"])
    return {**variables, "batch_stats": stats}


def _statistics(
    apply: Callable, variables: dict[str, PyTree], carry: None, batch: Any
) -> tuple[PyTree, None]:
    """The statistics of one batch; MaskedNode for what else is in the collection."""
    paths: set[tuple[str, ...]] = set()

    def run(next_call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        norm = context.module
        if not isinstance(norm, nn.BatchNorm) or context.method_name != "__call__":
            return next_call(*args, **kwargs)
        paths.add(norm.path)
        kept = {name: getattr(norm, name) for name in _WHOLE_BATCH}
        kwargs = {k: v for k, v in kwargs.items() if k != "use_running_average"}
        try:
            _set(norm, _WHOLE_BATCH)
            return next_call(args[0], **kwargs)
        finally:
            _set(norm, kept)

    def of_norm(path: Any) -> bool:
        names = tuple(key.key for key in path)
        return any(names[: len(norm)] == norm for norm in paths)

    # A momentum of 0 would still pass on what is not finite.
    finite = jax.tree.map(jnp.nan_to_num, variables.get("batch_stats", {}))
    with nn.intercept_methods(run):
        new = apply({**variables, "batch_stats": finite}, batch)[1]["batch_stats"]
    if not paths:
        _checks.no_batch_norm("flax.linen.BatchNorm", "apply runs")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if of_norm(path) else optax.MaskedNode(), new
    ), carry


_WHOLE_BATCH = {"momentum": 0.0, "use_running_average": False}


def _set(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Sets attributes of a module that is bound, and therefore frozen."""
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def _as_variables(params: PyTree) -> dict[str, PyTree]:
    """The collections in ``params``: one, or two where Flax keeps fp8 scales there."""
    if OVERWRITE_WITH_GRADIENT in params:
        return dict(params)
    return {"params": params}
