"""`emaopt.nnx` under the transformations, modes, meshes and wrappers of Flax."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax import nnx
from flax_models import (
    NNX_DECAY,
    Values,
    assert_average,
    assert_same,
    batches,
    nbytes,
    nnx_start,
    nnx_step,
    pure,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import emaopt
import emaopt.nnx

MODES = "graph" in inspect.signature(nnx.split).parameters  # flax >= 0.12


@pytest.fixture(scope="module")
def data():
    return batches(np.random.default_rng(3), 6)


def test_inside_nnx_scan_and_through_split_and_merge(data):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def scanned(carry, batch):
        nnx_step(*carry, *batch)
        return carry, [jnp.copy(leaf) for leaf in pure(nnx.state(carry[0], nnx.Param))]

    (model, optimizer, ema), history = scanned(nnx_start(), data)
    merged = nnx.merge(*nnx.split(ema))
    assert merged.decay == NNX_DECAY
    for found in (merged.apply_to(model), emaopt.nnx.eval_model(optimizer, model)):
        assert_average(pure(nnx.state(found, nnx.Param)), history, NNX_DECAY)


@pytest.mark.skipif(not MODES, reason="tree mode came with flax 0.12")
def test_tree_mode(rng):
    values = rng.normal(size=(3, 2, 3)).astype(np.float32)
    with nnx.set_graph_mode(False):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        ema = emaopt.nnx.EMA(model, 0.5)

        @nnx.jit(graph=False)
        def absorb(model, ema, value):
            model.kernel[...] = value
            ema.update(model)

        for value in values:
            absorb(model, ema, value)
        found = ema.apply_to(model)
    assert_average(found.kernel[...], values, 0.5)
    ema = emaopt.nnx.EMA(model, 0.5, graph=False)
    for value in values:
        model.kernel[...] = jnp.asarray(value)
        ema.update(model)
    assert_average(ema.apply_to(model).kernel[...], values, 0.5)


def test_shared_variables_stay_shared():
    class Tied(nnx.Module):
        def __init__(self):
            self.one = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.other = self.one

    model = Tied()
    ema = emaopt.nnx.EMA(model, 0.5)
    ema.update(model)
    found = ema.apply_to(model)
    assert found.one is found.other
    assert nbytes(ema.average.m) == 4 * (4 + 2)


def test_runs_on_donated_buffers_and_outlives_them():
    model, optimizer, ema = trained = nnx_start(warm_start=True)
    models = ema.apply_to(model), emaopt.nnx.eval_model(optimizer, model)
    before = [jax.tree.map(np.asarray, nnx.state(one, nnx.Param)) for one in models]
    images, labels = batches(np.random.default_rng(0), 1)
    donated = nnx.jit(nnx_step, donate_argnums=(0, 1, 2))
    for _ in range(2):
        donated(*trained, images[0], labels[0])
    for leaf in pure(nnx.state(trained)):
        leaf.delete()
    after = [jax.tree.map(np.asarray, nnx.state(one, nnx.Param)) for one in models]
    assert_same(after, before)


@pytest.mark.standard_promotion
def test_inside_wrappers_of_an_optimizer():
    def trained(tx, steps):
        model = Values(w=nnx.Param(jnp.float32(0)), v=nnx.Param(jnp.float32(0)))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for _ in range(steps):
            grads = nnx.grad(lambda model: -model.w[...] - model.v[...])(model)
            optimizer.update(model, grads)
        found = emaopt.nnx.eval_model(optimizer, model)
        return float(found.w[...]), float(found.v[...])

    chain = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    every_fourth = optax.MultiSteps(chain, 4).gradient_transformation()
    assert trained(every_fourth, 8) == pytest.approx((5 / 3, 5 / 3), rel=2.0**-22)
    if MODES:  # before flax 0.12 nnx.Optimizer takes no transformation with a mask
        masked = optax.masked(emaopt.params_ema(0.5), only_w)
        chain = optax.chain(optax.sgd(1.0), masked)
        assert trained(chain, 2) == pytest.approx((5 / 3, 2.0), rel=2.0**-22)


def only_w(params):
    return jax.tree.map_with_path(lambda path, _: path[0].key == "w", params)


def test_variables_of_trees_and_modules_in_lists(rng):
    model = Values(tree=nnx.Variable({"x": jnp.ones(2), "n": jnp.int32(3)}))
    first, second = (nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(2))
    model.layers = nnx.List([first, second]) if MODES else [first, second]
    ema = emaopt.nnx.EMA(model, 0.5)
    ema.update(model)
    found = ema.apply_to(model)
    assert_same(nnx.state(found), nnx.state(model))
    assert nbytes(ema.average.m) == 4 * (2 + 4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_metadata_and_shardings_are_kept(kind):
    mesh = jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("x", None))
    model = Values(w=nnx.Param(jax.device_put(jnp.ones((8, 2)), sharding), note="here"))
    tx = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    ema = emaopt.nnx.EMA(model, 0.5)
    jitted_update = nnx.jit(lambda ema, model: ema.update(model))
    for update in (type(ema).update, jitted_update):
        update(ema, model)
        assert ema.average.m["w"][...].sharding.is_equivalent_to(sharding, 2)
    assert ema.average.m["w"].get_metadata()["note"] == "here"
    for found in (ema.apply_to(model), emaopt.nnx.eval_model(optimizer, model)):
        assert found.w[...].sharding.is_equivalent_to(sharding, 2)
        assert found.w.get_metadata() == model.w.get_metadata()


def test_no_update_from_another_trace():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    ema = emaopt.nnx.EMA(model, 0.9)
    before = nnx.state(ema)
    with pytest.raises(Exception, match="different trace level"):
        jax.jit(lambda: ema.update(model))()
    assert_same(nnx.state(ema), before)


def test_a_traced_decay_is_state(rng):
    values = rng.normal(size=(3, 2, 3)).astype(np.float32)

    @nnx.jit
    def make(model, decay):
        return emaopt.nnx.EMA(model, decay)

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    ema = make(model, jnp.float32(0.9))
    assert ema.decay == np.float32(0.9)
    for value in values:
        model.kernel[...] = jnp.asarray(value)
        ema.update(model)
    assert_average(ema.apply_to(model).kernel[...], values, np.float32(0.9))


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated:UserWarning")
def test_hooks_are_not_run_on_the_average():
    model = Values(w=nnx.Param(jnp.float32(3), on_set_value=lambda _, value: 2 * value))
    ema = emaopt.nnx.EMA(model, 0.5)
    for _ in range(3):
        ema.update(model)
    found = ema.apply_to(model).w
    np.testing.assert_allclose(found[...], 3, rtol=2 * oracles.ULP)
    assert found.get_metadata() == model.w.get_metadata()
