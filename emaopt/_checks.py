"""Every boundary check, and the wording of every error.

Facts that are static under ``jit`` (structure, shape, dtype) raise the
``AssertionError`` of chex while tracing; wrong hyperparameters raise
``ValueError`` or ``TypeError`` where they are given.
"""

import datetime
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.experimental import checkify

PyTree = Any
PyTreeDef = Any


def is_masked(node: Any) -> bool:
    """Whether ``node`` stands for a leaf that is not averaged."""
    return isinstance(node, optax.MaskedNode)


def concrete(value: Any) -> bool:
    """Whether the elements of ``value`` can be read now."""
    if isinstance(value, Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def dtype_of(leaf: Any) -> np.dtype:
    """The dtype JAX gives ``leaf``; object where it is no array at all."""
    if hasattr(leaf, "dtype") and not isinstance(leaf, type):
        plain = isinstance(leaf, (np.ndarray, np.generic))
        if plain and leaf.dtype != jax.dtypes.float0:
            return jax.dtypes.canonicalize_dtype(leaf.dtype)
        return leaf.dtype
    # Not everything else: a string such as "f4" is the name of a dtype to JAX.
    if isinstance(leaf, (bool, int, float, complex)):
        return np.dtype(jnp.result_type(leaf))
    return np.dtype(object)


def is_number(leaf: Any) -> bool:
    """Whether ``leaf`` is a real or complex number or an array of them."""
    dtype = dtype_of(leaf)
    if dtype == jax.dtypes.float0:
        return False
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def is_inexact(leaf: Any) -> bool:
    """Whether ``leaf`` is a floating-point or complex number or array."""
    return is_number(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def output_dtype(leaf: Any) -> np.dtype:
    """The dtype of the average of ``leaf``: its own, float32 for integers."""
    return dtype_of(leaf) if is_inexact(leaf) else np.dtype(np.float32)


def where(path: jax.tree_util.KeyPath) -> str:
    """How an error names the leaf at ``path``."""
    return f"at {jax.tree_util.keystr(path)}" if path else "at the root"


def wide_dtype(*dtypes: Any) -> np.dtype:
    """The least dtype of at least float32 that holds all of ``dtypes``."""
    full = np.dtype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        for dtype in dtypes:
            if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32:
                full = np.dtype(jnp.promote_types(full, dtype))
    return full


def real_dtype(dtype: Any) -> np.dtype:
    """The floating dtype of the parts of ``dtype``."""
    return jnp.finfo(dtype).dtype


def flag(name: str, value: Any) -> bool:
    """Returns ``value``, which must be a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def option(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Returns ``value``, which must be one of ``choices``."""
    if not (isinstance(value, str) and value in choices):
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}.")
    return value


def whole(name: str, value: Any, *, least: int) -> Any:
    """Returns a whole number >= ``least``; a traced value passes unchecked."""
    if not concrete(value):
        return jnp.asarray(value).astype(jnp.int32)
    expected = f"{name} must be a whole number >= {least}, got {value!r}."
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(expected) from None
    if isinstance(value, (str, bytes)) or dtype_of(value) == np.bool_:
        raise TypeError(expected)
    if not (number >= least and number == math.floor(number) < 2**31):
        raise ValueError(expected)
    return int(number)


def number_in_range(name: str, value: Any, inside: Callable, interval: str) -> None:
    """Raises unless all of the concrete ``value`` is ``inside`` the interval."""
    if not np.all(inside(np.asarray(value, np.float64))):
        raise ValueError(f"{name} must be in {interval}, got {value}.")


def real_number(name: str, value: Any, inside: Callable, interval: str) -> Any:
    """Returns ``value``, one real number in the interval; traced it is not checked."""
    if not concrete(value):
        return value
    dtype = dtype_of(value)
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, np.integer)
    if not real or np.ndim(value):
        raise TypeError(f"{name} must be a real number in {interval}, got {value!r}.")
    number_in_range(name, value, inside, interval)
    return float(value)


def ordered(low_name: str, low: Any, high_name: str, high: Any) -> None:
    """Raises where two bounds are known, and the lower is above the upper."""
    if concrete(low) and concrete(high) and low > high:
        raise ValueError(
            f"{low_name} must not be above {high_name}, got {low} and {high}."
        )


def one_of(name: str, value: Any, other_name: str, other: Any) -> None:
    """Raises unless exactly one of two arguments is given."""
    if (value is None) == (other is None):
        given = "neither" if value is None else "both"
        raise ValueError(f"give {name} or {other_name}, and not both; got {given}.")


def decay_dtype(name: str, value: Any) -> None:
    """Raises unless ``value`` is a real number, held in float32 at least."""
    dtype = dtype_of(value)
    if not is_number(value) or dtype == np.bool_:
        raise TypeError(
            f"{name} must be a real number, an optax.Schedule or a pytree of them, "
            f"got {value!r}."
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be real, got dtype {dtype}.")
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{name} is held in {dtype}, in which 0.999 rounds to "
            f"{float(np.asarray(0.999, dtype)):g}; hold it in float32 (with "
            "optax.inject_hyperparams: hyperparam_dtype=jnp.float32)."
        )


def decay_range(name: str, value: Any, *, closed: bool) -> None:
    """Checks a decay: by value where concrete, else by one debug check."""
    interval = "[0, 1]" if closed else "[0, 1)"
    if concrete(value):
        number_in_range(
            name,
            value,
            lambda b: (b >= 0) & ((b <= 1) if closed else (b < 1)),
            interval,
        )
    else:
        inside = (value >= 0) & ((value <= 1) if closed else (value < 1))
        checkify.debug_check(
            jnp.all(inside), f"{name} must be in {interval}, got {{got}}.", got=value
        )


def accumulator(dtype: Any) -> np.dtype | None:
    """Returns a requested accumulator dtype, which must not stall."""
    if dtype is None:
        return None
    requested = np.dtype(dtype)
    if not jnp.issubdtype(requested, jnp.floating):
        raise ValueError(
            f"accumulator_dtype must be a floating-point dtype, got {requested}."
            " Complex leaves are averaged as complex numbers of its width."
        )
    if jnp.finfo(requested).bits < 32:
        raise ValueError(
            f"accumulator_dtype must be float32 or wider, got {requested}: an average "
            "held in it stops moving. The output has the dtype of the input whatever "
            "the accumulator is."
        )
    if jax.dtypes.canonicalize_dtype(requested) != requested:
        raise ValueError(
            f"accumulator_dtype={requested} needs jax_enable_x64, which is off."
        )
    return requested


def accumulator_for(path: Any, leaf: Any, requested: np.dtype | None) -> np.dtype:
    """The accumulator dtype of ``leaf``: ``requested``, else at least float32."""
    if not is_number(leaf):
        raise TypeError(
            f"the leaf {where(path)} is no number: found {_describe(leaf)}, expected a "
            "real or complex array. Leave it out, or put optax.MaskedNode() there."
        )
    least = wide_dtype(dtype_of(leaf))
    if requested is None:
        return least
    found = wide_dtype(requested, np.complex64) if least.kind == "c" else requested
    if wide_dtype(found, least) != found:
        raise ValueError(
            f"accumulator_dtype={requested} is narrower than the leaf {where(path)}: "
            f"found {dtype_of(leaf)}, which needs {least} or wider."
        )
    return found


def matched(
    name: str,
    m: PyTree,
    tree: PyTree,
    *,
    time: bool = False,
    rule: str = "absorbed",
    advice: str = (
        "The structure must be that of the tree the state was initialised from."
    ),
) -> list[Any]:
    """The leaves of ``tree`` that belong to those of ``m``, checked.

    Where ``m`` has a MaskedNode, whatever ``tree`` has there is passed over. With
    ``time`` the leaves have a leading time axis, of one length. The dtype ``rule``:
    what is "absorbed" may not be wider than its accumulator; what is "added" to values
    of their own dtype, or tells how to "read" the average, may.
    """
    accumulators, treedef = jax.tree.flatten(m, is_leaf=is_masked)
    try:
        found = treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        _structure_differs(name, m, tree, advice)
    steps = None
    leaves = []
    for index, (acc, leaf) in enumerate(zip(accumulators, found, strict=True)):
        if is_masked(acc):
            continue
        if not jax.tree_util.all_leaves([leaf]):
            _structure_differs(name, m, tree, advice)
        x = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        expected = acc.shape
        if time:
            steps = (x.shape[0] if x.ndim else -1) if steps is None else steps
            expected = (steps, *acc.shape) if steps >= 0 else ("time", *acc.shape)
        if x.shape != expected:
            words = f"found shape {x.shape}, expected {expected}".replace("'", "")
            message = (
                f"{name} {where(_path_of(m, index))}: {words}. Shapes never broadcast: "
                "initialise the state from values of the shape it will be given."
            )
            if time:
                message += " A state is of one step: init(values[0])."
            chex.assert_rank(x, len(expected), custom_message=message)
            chex.assert_shape(x, expected, custom_message=message)
        _assert_dtype(name, m, index, acc.dtype, leaf, rule)
        leaves.append(leaf)
    return leaves


def nnx_optimizer(optimizer: Any, kind: type) -> None:
    """Raises unless ``optimizer`` is one of nnx."""
    if not isinstance(optimizer, kind):
        raise TypeError(
            f"optimizer must be an nnx.Optimizer, got {type(optimizer).__name__}: call "
            "eval_model(optimizer, model)."
        )


def kind_of_state(name: str, state: Any, kind: type) -> None:
    """Raises for a state of another type, such as one of another library."""
    if not isinstance(state, kind):
        found, expected = (f"{t.__module__}.{t.__name__}" for t in (type(state), kind))
        _fail(
            f"{name}: found {found}, expected {expected}. Pass the state that this "
            "average made; find_state finds it in that of an optimizer."
        )


def weights_fit(m: PyTree, owned: list[Any]) -> None:
    """Raises where a weight is neither that of its leaf nor of each of its elements."""
    for index, (leaf, weight) in enumerate(zip(jax.tree.leaves(m), owned, strict=True)):
        if weight.shape not in ((), leaf.shape):
            paths = jax.tree_util.tree_flatten_with_path(m)[0]
            _fail(
                f"state.weight {where(paths[index][0])}: found shape {weight.shape}, "
                f"expected () or {leaf.shape}, that of state.m. A state made under "
                "vmap is used and read under vmap."
            )


def same_types(name: str, expected: PyTree, found: PyTree) -> None:
    """Raises unless ``found`` has the structure, shapes and dtypes of ``expected``."""
    advice = "Both must come from one init."
    if jax.tree.structure(found) != jax.tree.structure(expected):
        _structure_differs(name, expected, found, advice)
    old = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (path, a), b in zip(old, jax.tree.leaves(found), strict=True):
        for kind, x, y in (("shape", a.shape, b.shape), ("dtype", a.dtype, b.dtype)):
            if x != y:
                _fail(f"{name} {where(path)}: found {kind} {y}, expected {x}. {advice}")


def _assert_dtype(
    name: str, m: PyTree, index: int, accumulator_dtype: Any, x: Any, rule: str
) -> None:
    """The dtype rule: numbers only, and into an accumulator that is no narrower."""

    def fail(found: str, expected: str, subject: str = name) -> NoReturn:
        _fail(
            f"{subject} {where(_path_of(m, index))}: found {found}, expected {expected}"
        )

    dtype = dtype_of(x)
    if jnp.finfo(accumulator_dtype).bits < 32:
        fail(
            str(accumulator_dtype),
            "float32 or wider. Cast the state to the dtypes that init gave it.",
            "the state",
        )
    if not is_number(x):
        fail(_describe(x), "a number, since the state averages this leaf.")
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    if rule == "read" and real and accumulator_dtype.kind == "c":
        fail(_describe(x), "a complex leaf, since the average is complex.")
    if rule == "added" and not real and accumulator_dtype.kind != "c":
        fail(_describe(x), "a real leaf, since the parameters are real.")
    if rule == "absorbed" and not real and accumulator_dtype.kind != "c":
        fail(
            _describe(x),
            f"real numbers, since the average is {accumulator_dtype}. Initialise the "
            "state from complex values.",
        )
    # A Python number has no width of its own, and takes that of the accumulator.
    weak = isinstance(x, (bool, int, float, complex)) or getattr(x, "weak_type", False)
    if weak:
        dtype = np.dtype(np.float32 if real else np.complex64)
    wider = wide_dtype(dtype, accumulator_dtype)
    if rule == "absorbed" and wider != accumulator_dtype:
        fail(
            _describe(x),
            f"no wider than {accumulator_dtype}, the accumulator. Initialise the state "
            f"from such values, or with accumulator_dtype={real_dtype(wider)}.",
        )


def _fail(message: str) -> NoReturn:
    """Raises as a chex static assertion does."""
    raise AssertionError(f"[emaopt] {message}")


def _describe(leaf: Any) -> str:
    """A leaf in an error: its dtype, or its type where it has none."""
    if hasattr(leaf, "dtype"):
        return f"dtype {leaf.dtype}"
    kind, value = type(leaf).__name__, repr(leaf)
    return kind if "\n" in value else f"{kind} {value}"


def _path_of(tree: PyTree, index: int) -> jax.tree_util.KeyPath:
    """The path of the leaf number ``index``, MaskedNodes counted."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)[0]
    return paths[index][0]


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values one level down; None for a leaf."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
    pairs = [(path, child) for path, child in found[0]]
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [(path[0], child) for path, child in pairs]


def _differences(expected: Any, found: Any, path: tuple) -> Iterator[str]:
    """Where two structures part, in words, outermost first."""
    if is_masked(expected):
        return
    old, new = _children(expected), _children(found)
    if old is None and new is None:
        return
    if old is None or new is None or type(expected) is not type(found):
        as_words = [
            "a leaf" if children is None else f"a {type(node).__name__}"
            for node, children in ((found, new), (expected, old))
        ]
        yield f"{where(path)}: found {as_words[0]}, expected {as_words[1]}"
        return
    old_keys, new_keys = [k for k, _ in old], [k for k, _ in new]
    for key in old_keys:
        if key not in new_keys:
            yield f"{where((*path, key))}: found nothing, expected a value"
    for key in new_keys:
        if key not in old_keys:
            yield f"{where((*path, key))}: found a value, expected nothing"
    for (key, child), (_, other) in zip(old, new, strict=False):
        yield from _differences(child, other, (*path, key))


def _structure_differs(
    name: str, expected: PyTree, found: PyTree, advice: str
) -> NoReturn:
    difference = next(
        _differences(expected, found, ()),
        f"found {jax.tree.structure(found)}, expected {jax.tree.structure(expected)}",
    )
    _fail(f"{name} {difference}. {advice}")


def time_axis(
    values: list[Any], decay: Any, observed: Any, reset: Any
) -> tuple[int, ...]:
    """The shape (T,) of the time axis, that of whatever has one."""
    for leaf in [*values, *jax.tree.leaves((observed, reset, decay))]:
        if np.ndim(leaf):
            return np.shape(leaf)[:1]
    return (0,)


def resets(reset: Any, lead: tuple[int, ...]) -> jax.Array | None:
    """Returns one bool for each step, or None."""
    if reset is None:
        return None
    if dtype_of(reset) != np.bool_:
        raise TypeError(f"reset must be bool, got {_describe(reset)}.")
    if np.shape(reset) != lead:
        raise ValueError(
            f"reset must have one bool for each step: found shape {np.shape(reset)}, "
            f"expected {lead}."
        )
    return jnp.asarray(reset)


def mesh_axis(axis_name: Any) -> None:
    """Raises unless ``axis_name`` is an axis that code here is mapped over."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is no axis here: call scan inside jax.shard_map "
            "over a mesh with that axis, or emaopt.sharded_scan, which does."
        ) from None


def axes_of(mesh: jax.sharding.Mesh, axis_name: Any, axes: tuple[Any, ...]) -> None:
    """Raises unless the ``axes`` that ``axis_name`` names are those of ``mesh``."""
    if not axes or any(axis not in mesh.shape for axis in axes):
        names = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(
            f"axis_name must name an axis of the mesh ({names}), got {axis_name!r}."
        )


def shards(steps: int, size: int, axis_name: Any) -> None:
    """Raises unless time divides into shards of one length."""
    if steps % size:
        raise ValueError(
            f"values have {steps} steps, which the {size} shards over "
            f"axis_name={axis_name!r} do not divide. Pad them with steps that are not "
            "observed, or scan the rest from the state that comes back."
        )


def blocked_applies(possible: bool) -> None:
    """Raises where the blocked method cannot compute what is asked."""
    if not possible:
        raise ValueError(
            'method="blocked" needs real values, one decay for all steps, no observed '
            'and no reset; use method="scan" or "associative".'
        )


def sequence(name: str, values: Any) -> jax.Array:
    """``values`` as an array of numbers with a leading time axis."""
    for part in jax.tree.leaves(
        values, is_leaf=lambda node: not isinstance(node, (list, tuple))
    ):
        if not is_number(part):
            _fail(
                f"{name}: found {_describe(part)}, expected an array of numbers"
                f"{': pass its .to_numpy().' if hasattr(part, 'to_numpy') else '.'}"
            )
    try:
        values = jnp.asarray(values)
    except (TypeError, ValueError) as error:
        _fail(f"{name}: expected an array of numbers, found none: {error}")
    if not values.ndim:
        message = f"{name}: found shape (), expected a leading time axis."
        chex.assert_rank(values, 1, custom_message=message)
    return values


def decay_or_times(decay: Any, times: Any, halflife: Any) -> None:
    """Raises unless there is a decay, or times with a half-life, and not both."""
    if decay is None and times is None:
        if halflife is not None:
            raise ValueError(
                f"halflife={halflife!r} goes with times; for steps of equal length "
                "give decay=decay_from_halflife(halflife)."
            )
        raise ValueError(
            "give a decay (decay_from_alpha, decay_from_com, decay_from_span and "
            "decay_from_halflife make one), or times with halflife; got neither."
        )
    if decay is not None:
        for name, value in (("times", times), ("halflife", halflife)):
            if value is not None:
                raise ValueError(
                    f"give a decay, or times with halflife, and not both; got "
                    f"decay={decay!r} and {name}."
                )
        if callable(decay) or np.shape(decay) != ():
            raise ValueError(f"decay must be one number in [0, 1), got {decay!r}.")
    elif halflife is None:
        raise ValueError("times need a halflife, got halflife=None.")


def series(arrays: dict[str, Any], *, real: bool) -> list[jax.Array]:
    """The named ``arrays``, of numbers, with a time axis and of one shape."""
    found = [sequence(name, values) for name, values in arrays.items()]
    for name, x in zip(arrays, found, strict=True):
        if real and jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real, got dtype {x.dtype}.")
        if x.shape != found[0].shape:
            message = (
                f"{name}: found shape {x.shape}, expected {found[0].shape}, that of "
                f"{next(iter(arrays))}."
            )
            chex.assert_equal_shape([x, found[0]], custom_message=message)
    return found


def common_dtype(*arrays: jax.Array) -> np.dtype:
    """The dtype of what is made from all ``arrays``: theirs, or the widest."""
    dtypes = {output_dtype(x) for x in arrays}
    return dtypes.pop() if len(dtypes) == 1 else wide_dtype(*dtypes)


def axis(name: str, value: Any, rank: int) -> int:
    """An axis of an array of ``rank`` dimensions, counted from the front."""
    expected = f"{name} must be a whole number in [{-rank}, {rank}), got {value!r}."
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(expected) from None
    if not -rank <= index < rank:
        raise ValueError(expected)
    return index % rank


def times(times: Any, halflife: Any, steps: int) -> tuple[Any, Any]:
    """Times and half-life: NumPy arrays and a number or timedelta, unless traced."""
    if concrete(times):
        times = np.asarray(times)
    if times.shape != (steps,):
        raise ValueError(
            f"times must have one value for each step: found shape {times.shape}, "
            f"expected ({steps},)."
        )
    dates = times.dtype.kind == "M"
    real = jnp.issubdtype(times.dtype, jnp.floating)
    if not (dates or real or jnp.issubdtype(times.dtype, np.integer)):
        raise TypeError(
            f"times must be real numbers or numpy.datetime64, got dtype {times.dtype}."
        )
    if isinstance(times, np.ndarray):
        times = times.astype(np.float64) if real else times
        for index in np.flatnonzero(~np.isfinite(times))[:1]:
            raise ValueError(
                f"times must be finite, got {times[index]} at step {index}."
            )
        for index in np.flatnonzero(times[1:] < times[:-1])[:1]:
            raise ValueError(
                f"times must not decrease, got {times[index + 1]} at step "
                f"{index + 1}, after {times[index]}."
            )
    else:
        checkify.debug_check(
            jnp.all(times[1:] >= times[:-1]), "times must not decrease."
        )
    interval = isinstance(halflife, (np.timedelta64, datetime.timedelta))
    if dates != interval:
        expected = "a timedelta, since times are dates" if dates else "a number"
        raise TypeError(f"halflife must be {expected}, got {halflife!r}.")
    if dates:
        halflife = np.timedelta64(halflife)
        if not halflife.astype(np.int64) > 0:
            raise ValueError(f"halflife must be positive, got {halflife!r}.")
        try:
            np.result_type(np.diff(times), halflife)
        except TypeError:
            raise ValueError(
                f"halflife={halflife!r} has no fixed length in the unit of times, "
                f"{times.dtype}."
            ) from None
    else:
        halflife = real_number(
            "halflife", halflife, lambda h: (h > 0) & (h < np.inf), "(0, inf)"
        )
    return times, halflife


def params_given(name: str, params: Any) -> None:
    """Raises where a transformation that needs the parameters has none."""
    if params is None:
        raise ValueError(
            f"{name} averages the parameters after the step, and got params=None: call "
            "optimizer.update(updates, state, params)."
        )


def not_abstract(path: Any, leaf: Any) -> None:
    """Raises for a leaf without values, from which no average can start."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(
            f"warm_start needs values, and the leaf {where(path)} is abstract: {leaf}."
        )


def prefix(name: str, tree: PyTree, full: PyTree) -> None:
    """Raises unless ``tree`` is a prefix of ``full``, or ``full`` has no leaves."""
    if not jax.tree.leaves(full):
        return
    treedef = jax.tree.structure(tree, is_leaf=callable)
    try:
        treedef.flatten_up_to(full)
    except (ValueError, TypeError):
        raise ValueError(
            f"{name} must be one value or a pytree prefix of the tree, got structure "
            f"{treedef} for {jax.tree.structure(full)}."
        ) from None


def broadcast(
    name: str, tree: PyTree, treedef: PyTreeDef, is_leaf: Callable
) -> list[Any]:
    """The leaves of the prefix ``tree``, one for each weight of the state."""
    full = treedef.unflatten(range(treedef.num_leaves))
    try:
        return jax.tree.leaves(
            jax.tree.broadcast(tree, full, is_leaf=is_leaf), is_leaf=is_leaf
        )
    except ValueError:
        found = jax.tree.structure(tree, is_leaf=is_leaf)
        raise ValueError(
            f"{name} is finer than the state: found structure {found}, expected a "
            f"prefix of {treedef}, that of state.weight. Make the state with "
            "init(tree, decay=decay), or with per_element=True."
        ) from None


def rates(
    tree: PyTree,
    treedef: PyTreeDef,
    weights: list[Any],
    is_leaf: Callable,
    lead: tuple[int, ...] = (),
) -> list[Any]:
    """A rate for each weight of the state, at each step where ``lead`` is (T,)."""
    found = broadcast("decay", tree, treedef, is_leaf)
    for rate, weight in zip(found, weights, strict=True):
        shape, full = np.shape(rate.decay), (*lead, *weight.shape)
        if shape != () and not _fits(shape, full, lead):
            allowed = " or ".join(dict.fromkeys(map(str, ((), lead, full))))
            raise ValueError(
                f"decay has shape {shape}, expected {allowed}. Decays within a leaf "
                "need init(..., per_element=True), decays in time emaopt.scan."
            )
    return found


def masks(
    name: str,
    mask: PyTree,
    treedef: PyTreeDef,
    weights: list[Any],
    lead: tuple[int, ...] = (),
) -> list[Any]:
    """A mask for each weight of the state, each a bool that broadcasts to it."""
    found = broadcast(name, mask, treedef, lambda node: False)
    for leaf, weight in zip(found, weights, strict=True):
        if dtype_of(leaf) != np.bool_:
            raise TypeError(f"{name} must be bool, got {_describe(leaf)}.")
        shape, full = np.shape(leaf), (*lead, *weight.shape)
        if (lead or shape) and not _fits(shape, full, lead):
            fault = "does not fit" if lead else "is finer than"
            shapes = (lead, full) if lead else (full,)
            allowed = " or ".join(dict.fromkeys(map(str, shapes)))
            raise ValueError(
                f"{name} {fault} the state: found shape {shape}, expected {allowed}. A "
                "mask within a leaf needs init(..., per_element=True)."
            )
    return found


def _fits(shape: tuple, full: tuple, lead: tuple) -> bool:
    """Whether ``shape`` is ``lead``, or ``full`` with 1s behind ``lead``."""
    if shape == lead:
        return True
    same = len(shape) == len(full) and shape[: len(lead)] == lead
    return same and all(a in (1, b) for a, b in zip(shape, full, strict=True))


def none_found(parameters: bool, others: list[str], swapped: bool) -> NoReturn:
    """Raises for an optimizer's state without the average asked for."""
    kind = "average of parameters (params_ema)" if parameters else "average"
    found = "".join(f"\n  {line}" for line in others) or " none of any kind"
    advice = "Put emaopt.params_ema(decay) last in the optax.chain."
    if not parameters:
        advice = advice[:-1] + ", or emaopt.ema(decay) anywhere in it."
    if swapped:
        advice = "There is one in params: call eval_params(opt_state, params)."
    raise LookupError(
        f"found no {kind} in the optimizer's state; averages there:{found}\n{advice}"
    )


def ambiguous(found: list[str]) -> NoReturn:
    """Raises where several averages cover one leaf."""
    listed = "".join(f"\n  {line}" for line in found)
    raise LookupError(
        f"found {len(found)} averages of the same leaves:{listed}\n"
        "Choose one with which=, by its index or by a name on its path."
    )


def fast_parameters(path: jax.tree_util.KeyPath, advice: str) -> NoReturn:
    """Raises for an average inside ``optax.lookahead``."""
    _fail(
        f"params_ema {where(path)}: found inside optax.lookahead, where it sees the "
        f"fast parameters before they are synchronised. {advice}"
    )


def no_such(which: Any, found: list[str]) -> NoReturn:
    """Raises where ``which`` names no average."""
    listed = "".join(f"\n  {line}" for line in found)
    raise LookupError(f"which={which!r} is none of the averages found:{listed}")


def flax_missing(module: str, error: ImportError) -> NoReturn:
    """Raises where an adapter is imported without Flax."""
    raise ImportError(
        f'{module} needs Flax, which is an extra: pip install "emaopt[flax]" ({error}).'
    ) from error


def collections(given: dict[str, Any]) -> None:
    """Raises unless every collection is a mapping of variables."""
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{name} must be a collection of variables (a dict) or a field of the "
                f"state, got {type(value).__name__}."
            )


def known(name: str, given: Iterable[str], expected: Iterable[str]) -> None:
    """Raises unless ``given`` names only collections that are there."""
    for key in given:
        if key not in expected:
            there = ", ".join(repr(key) for key in expected) or "none"
            raise ValueError(
                f"{name} must name collections of the state, got {key!r}; "
                f"given to create: {there}."
            )


def not_static(name: str, decay: Any) -> NoReturn:
    """Raises for a decay that cannot be a static field."""
    raise TypeError(
        f"{name} must be one number whose value is known, or an optax.Schedule, "
        f"got {decay!r}."
    )


def no_batches() -> NoReturn:
    """Raises where a mean over batches has none."""
    raise ValueError("batches must give at least one batch, got none.")


def no_batch_norm(kind: str, place: str) -> NoReturn:
    """Raises where there are no statistics to recompute."""
    raise ValueError(
        f"found no {kind} that {place}: there are no statistics to recompute. A "
        "function that is jitted already hides them: pass it as it is."
    )


def none_selected(only: Any) -> NoReturn:
    """Raises where a filter leaves nothing to average."""
    raise ValueError(
        f"only={only!r} must select at least one Variable of floating-point numbers, "
        "got none."
    )
