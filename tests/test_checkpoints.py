"""The state of an average through every kind of checkpoint, and onto other meshes."""

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax_models import assert_average, assert_same
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import emaopt
import emaopt.linen
import emaopt.nnx

DECAY = 0.9
TX = optax.chain(optax.sgd(0.1, momentum=0.5), emaopt.params_ema(DECAY))


def abstract(tree, sharding=None):
    """``tree`` without its values; with another sharding for its matrices."""

    def shape_of(leaf):
        mine = sharding if sharding is not None and leaf.ndim == 2 else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=mine)

    return jax.tree.map(shape_of, tree)


def standard(path, tree, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


def pytree(path, tree, target):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        args = ocp.checkpoint_utils.construct_restore_args(target)
        return checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=target, restore_args=args)
        )


def msgpack(path, tree, target):
    path.write_bytes(serialization.to_bytes(tree))
    return serialization.from_bytes(target, path.read_bytes())


def state_dict(path, tree, target):
    return serialization.from_state_dict(target, serialization.to_state_dict(tree))


def pickled(path, tree, target):
    leaves, treedef = jax.tree.flatten(tree)
    path.write_bytes(pickle.dumps(jax.device_get(leaves)))
    return treedef.unflatten(pickle.loads(path.read_bytes()))


FORMATS = [standard, pytree, msgpack, state_dict, pickled]


@pytest.fixture
def values(rng):
    return jnp.asarray(rng.normal(size=(6, 8, 2)), jnp.float32)


def create():
    """Two dtypes, an average of the parameters, and one of a collection."""
    params = {"w": jnp.ones((8, 2)), "low": jnp.ones(2, jnp.bfloat16)}
    state = emaopt.linen.TrainState.create(
        apply_fn=None, params=params, tx=TX, average={"stats": 0.5}, stats=params
    )
    # Flax begins at a Python number, which no checkpoint gives back as one.
    return state.replace(step=jnp.int32(0))


@jax.jit
def train(state, values):
    def step(state, value):
        grads = {"w": value, "low": value[0].astype(jnp.bfloat16)}
        return state.apply_gradients(grads=grads, stats=grads), None

    return lax.scan(step, state, values)[0]


@pytest.mark.parametrize("through", FORMATS)
def test_linen_resumes_bit_for_bit(through, values, tmp_path):
    half = train(create(), values[:3])
    target = abstract(half) if through in (standard, pytree) else create()
    restored = through(tmp_path / "checkpoint", half, target)
    assert_same(restored, half)
    resumed, unbroken = train(restored, values[3:]), train(create(), values)
    assert_same(resumed, unbroken)
    assert_same(resumed.eval_variables(), unbroken.eval_variables())
    assert type(resumed.opt_state[1]) is emaopt.ParamsEmaState


def trained():
    model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return model, optimizer, emaopt.nnx.EMA(model, 0.5, compensated=True)


@nnx.jit
def train_nnx(model, optimizer, ema, values):
    for value in values:
        grads = nnx.grad(lambda m, v: jnp.sum(m.kernel[...] * v))(model, value)
        optimizer.update(model, grads)
        ema.update(model)


@pytest.mark.parametrize("through", FORMATS)
def test_nnx_resumes_bit_for_bit(through, values, tmp_path):
    unbroken, half, resumed = trained(), trained(), trained()
    train_nnx(*half, values[:3])
    train_nnx(*unbroken, values[:3])
    train_nnx(*unbroken, values[3:])
    state = nnx.state(half)
    if through in (msgpack, state_dict):
        # These formats know dicts, not nnx.State; and dicts with names for keys.
        for index, part in enumerate(half):
            pure = nnx.to_pure_dict(nnx.state(part))
            target = nnx.to_pure_dict(nnx.state(resumed[index]))
            restored = through(tmp_path / f"{index}", pure, target)
            part_state = nnx.state(resumed[index])
            nnx.replace_by_pure_dict(part_state, restored)
            nnx.update(resumed[index], part_state)
    else:
        restored = through(tmp_path / "checkpoint", state, abstract(state))
        for index, part in enumerate(resumed):
            nnx.update(part, restored[index])
    assert_same(nnx.state(resumed), state)
    train_nnx(*resumed, values[3:])
    assert_same(nnx.state(resumed), nnx.state(unbroken))


def shardings(kind=AxisType.Auto):
    meshes = [
        jax.make_mesh((n,), ("x",), (kind,), devices=jax.devices()[:n]) for n in (4, 2)
    ]
    return [NamedSharding(mesh, PartitionSpec("x", None)) for mesh in meshes]


@pytest.mark.parametrize("through", [standard, pytree])
def test_restores_onto_another_sharding(through, values, tmp_path):
    old, new = shardings()
    replicated = NamedSharding(old.mesh, PartitionSpec())
    state = jax.tree.map(
        lambda leaf: jax.device_put(leaf, old if leaf.ndim == 2 else replicated),
        train(create(), values[:3]),
    )
    scalars = NamedSharding(new.mesh, PartitionSpec())
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=new if leaf.ndim == 2 else scalars
        ),
        state,
    )
    restored = through(tmp_path / "checkpoint", state, target)
    average = emaopt.find_state(restored.opt_state)
    assert average.m["w"].sharding == new
    assert_same(restored, state)
    resumed = train(restored, values[3:])
    assert_same(resumed.eval_variables(), train(create(), values).eval_variables())
    found = emaopt.find_state(resumed.opt_state).m["w"].sharding
    assert found.is_equivalent_to(new, 2)


def test_restores_into_a_state_that_was_never_made(values, tmp_path):
    half = train(create(), values[:3])
    target = jax.eval_shape(create)
    assert_same(standard(tmp_path / "linen", half, target), half)
    parts = trained()
    train_nnx(*parts, values[:3])
    state = nnx.state(parts[2])
    shapes = nnx.eval_shape(lambda: trained()[2])
    nnx.update(shapes, standard(tmp_path / "nnx", state, nnx.state(shapes)))
    assert_same(nnx.state(shapes), state)
    assert_same(
        nnx.state(shapes.apply_to(parts[0])), nnx.state(parts[2].apply_to(parts[0]))
    )


def test_linen_names_what_does_not_fit_and_keeps_the_running_state(values, tmp_path):
    running = train(create(), values[:3])
    before = jax.tree.map(jnp.copy, running)
    wide = jax.tree.map(
        lambda leaf: jnp.zeros((8, 3)) if leaf.ndim == 2 else leaf, running
    )
    # Flax checks the keys of what it restores, not the shapes.
    restored = msgpack(tmp_path / "checkpoint", wide, running)
    mixed = running.replace(opt_state=(running.opt_state[0], restored.opt_state[1]))
    grads = running.params
    named = r"at \['w'\]: found shape \(8, 2\), expected \(8, 3\)"
    with pytest.raises(AssertionError, match=r"params " + named):
        mixed.eval_variables()
    with pytest.raises(AssertionError, match=r"params " + named):
        mixed.apply_gradients(grads=grads)
    mixed = running.replace(averages=restored.averages)
    with pytest.raises(AssertionError, match=r"stats " + named):
        mixed.eval_variables()
    with pytest.raises(AssertionError, match=r"stats " + named):
        mixed.apply_gradients(grads=grads, stats=grads)
    assert_same(running, before)
    assert_same(train(running, values[3:]), train(create(), values))


def test_nnx_names_what_does_not_fit_and_keeps_the_running_average(values):
    model, _, ema = trained()
    ema.update(model)
    before = jax.tree.map(jnp.copy, nnx.state(ema))
    two = nnx.Sequential(nnx.Linear(8, 2, rngs=nnx.Rngs(0)))
    for other, named in (
        (nnx.Linear(8, 3, rngs=nnx.Rngs(0)), r"\['bias'\]: found shape \(2,\)"),
        (two, r"\['bias'\]: found a value|\['layers'\]: found nothing"),
    ):
        restored = nnx.state(emaopt.nnx.EMA(other, 0.5, compensated=True))
        candidate = nnx.clone(ema)
        nnx.update(candidate, restored)
        with pytest.raises(AssertionError, match=named):
            candidate.apply_to(model)
    assert_same(nnx.state(ema), before)


def test_an_average_starts_on_a_checkpoint_without_one(values):
    inner, average = optax.adam(0.1), emaopt.params_ema(DECAY, warm_start=True)
    kernels = {"kernel": values[0], "bias": values[0, 0]}
    old = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    adam = nnx.Optimizer(old, inner, wrt=nnx.Param)

    def loss(model):
        return jnp.sum(model.kernel[...] * values[0]) + model.bias[...] @ values[0, 0]

    with jax.numpy_dtype_promotion("standard"):
        adam.update(old, nnx.grad(loss)(old))
        params = nnx.to_pure_dict(nnx.state(old, nnx.Param))

        # As a transformation: append the state of the average to that of the chain.
        tx = optax.chain(inner, average)
        inner_state = inner.init(params)
        _, inner_state = inner.update(kernels, inner_state, params)
        opt_state = (inner_state, average.init(params))
        updates, opt_state = tx.update(kernels, opt_state, params)
        after = optax.apply_updates(params, updates)

        # In nnx: hand the state of the old optimizer on.
        optimizer = nnx.Optimizer(old, tx, wrt=nnx.Param)
        nnx.update(optimizer.opt_state[0], nnx.state(adam.opt_state))
        optimizer.update(old, nnx.grad(loss)(old))
    found = emaopt.eval_params(opt_state, after)
    inside = nnx.to_pure_dict(nnx.state(emaopt.nnx.eval_model(optimizer, old)))
    for name in kernels:
        first, second = (np.asarray(tree[name], np.float64) for tree in (params, after))
        expected = DECAY * first + (1 - DECAY) * second
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(inside[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.standard_promotion
def test_the_state_of_optax_ema_goes_on_as_ours(values):
    theirs = optax.ema(DECAY)
    state = theirs.init(values[0])
    for value in values[:3]:
        _, state = theirs.update(value, state)
    log_power = int(state.count) * math.log(DECAY)
    ours = emaopt.init(values[0])._replace(
        m=state.ema,
        count=state.count,
        decay_power=jnp.float32(math.exp(log_power)),
        weight=jnp.float32(-math.expm1(log_power)),
    )
    transformation = emaopt.ema(DECAY)
    for value in values[3:]:
        emitted, ours = transformation.update(value, ours)
    assert_average(emitted, values, DECAY)
    assert ours.count == 6
    np.testing.assert_allclose(ours.weight, 1 - DECAY**6, rtol=4 * oracles.ULP)


@pytest.mark.skipif(not hasattr(nnx, "EMA"), reason="this flax has no nnx.EMA")
@pytest.mark.standard_promotion
def test_the_average_of_flax_goes_on_as_ours(values):
    model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    model.kernel[...] = values[0]
    theirs = nnx.EMA(model, DECAY)
    for value in values[1:3]:
        model.kernel[...] = value
        theirs.update(model)
    ours = emaopt.nnx.EMA(theirs.apply_to(model), DECAY, warm_start=True)
    for value in values[3:]:
        model.kernel[...] = value
        ours.update(model)
    exact = np.asarray(values, np.float64)
    expected = exact[0]
    for value in exact[1:]:
        expected = DECAY * expected + (1 - DECAY) * value
    found = ours.apply_to(model).kernel[...]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert_same(ours.average.weight[...], np.float32(1))
