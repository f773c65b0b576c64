"""`emaopt.linen`: the train state, batch statistics, evaluation, errors."""

import subprocess
import sys
from functools import cache, partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax.training import train_state
from flax_models import (
    LinenBlock,
    LinenCNN,
    assert_average,
    assert_same,
    batches,
    mean_loss,
    nbytes,
)
from jax import lax

import emaopt
import emaopt.linen

DECAY = 0.8


TX = optax.chain(optax.sgd(0.1), emaopt.params_ema(DECAY))


@cache
def variables():
    images = jnp.ones((8, 6, 6, 1))
    return jax.jit(partial(LinenCNN().init, train=False))(jax.random.key(0), images)


@cache
def start(tx=TX, statistics=None, **kwargs):
    """A state to start from; the statistics are averaged with that decay, or not."""
    if statistics is not None:
        kwargs["average"] = {"batch_stats": statistics}
    return emaopt.linen.TrainState.create(
        apply_fn=LinenCNN().apply, tx=tx, **variables(), **kwargs
    )


def step(state, batch):
    images, labels = batch
    key = jax.random.fold_in(jax.random.key(1), state.step)

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, **state.collections},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return mean_loss(logits, labels), updates

    grads, updates = jax.grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, **updates)


@jax.jit
def train(state, batches):
    """The last state, and the variables after every step."""

    def scanned(state, batch):
        state = step(state, batch)
        return state, state.variables

    # Flax begins at the Python number 0.
    return lax.scan(scanned, state.replace(step=jnp.asarray(state.step)), batches)


@pytest.fixture
def data(rng):
    return batches(rng, 6)


def test_the_average_of_a_cnn_with_batch_norm_and_dropout(data):
    state, history = train(start(statistics=0.5), data)
    found = jax.jit(lambda state: state.eval_variables())(state)
    assert_average(found["params"], history["params"], DECAY)
    assert_average(found["batch_stats"], history["batch_stats"], 0.5)
    # The statistics do move, and so do averaged and latest parameters part.
    latest = state.variables
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(latest), strict=True):
        assert one.dtype == other.dtype
        assert not np.array_equal(one, other)
    logits = state.apply_fn(found, data[0][0], train=False)
    assert np.all(np.isfinite(logits))


def test_statistics_that_are_not_averaged_are_the_latest(data):
    state, history = train(start(), data)
    found = state.eval_variables()
    assert state.averages == {}
    last = jax.tree.map(lambda leaf: leaf[-1], history["batch_stats"])
    assert_same(found["batch_stats"], last)
    assert_same(state.batch_stats, last)
    assert_average(found["params"], history["params"], DECAY)


def test_states_made_alike_are_alike():
    one, other = (
        emaopt.linen.TrainState.create(
            apply_fn=None, tx=TX, average={"batch_stats": decay}, **variables()
        )
        for decay in (0.5, jnp.float32(0.5))
    )
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_before_the_first_step_everything_is_as_it_is(data):
    state = start(statistics=0.9)
    assert_same(state.eval_variables(), state.variables)


def test_a_collection_left_out_stays_as_it_is(data):
    state = start(statistics=0.9)
    grads = jax.tree.map(jnp.ones_like, state.params)
    new = state.apply_gradients(grads=grads)
    assert_same(new.averages, state.averages)
    assert_same(new.batch_stats, state.batch_stats)
    assert new.step == 1


def test_with_the_train_state_of_flax(data):
    ours, history = train(start(), data)
    state = train_state.TrainState.create(
        apply_fn=LinenCNN().apply, params=variables()["params"], tx=ours.tx
    )
    state = state.replace(opt_state=ours.opt_state, params=ours.params)
    found = emaopt.eval_params(state.opt_state, state.params)
    assert_average(found, history["params"], DECAY)
    assert isinstance(ours, train_state.TrainState)


class WithMore(emaopt.linen.TrainState):
    seed: Any


def test_a_subclass_with_a_field_and_other_collections(data):
    model = nn.SpectralNorm(nn.Dense(2), collection_name="spectral")
    x = jnp.ones((1, 3))
    variables = flax.core.freeze(model.init(jax.random.key(0), x, update_stats=False))
    state = WithMore.create(
        apply_fn=model.apply,
        tx=optax.chain(optax.sgd(0.1), emaopt.params_ema(DECAY)),
        average={"spectral": 0.5},
        seed=jnp.int32(1),
        **variables,
    )
    _, updates = state.apply_fn(
        state.variables, x, update_stats=True, mutable=["spectral"]
    )
    state = state.apply_gradients(
        grads=jax.tree.map(jnp.ones_like, state.params), seed=jnp.int32(2), **updates
    )
    assert state.seed == 2
    assert_same(state.spectral, updates["spectral"])
    history = jax.tree.map(lambda leaf: leaf[None], updates["spectral"])
    assert_average(state.eval_variables()["spectral"], history, 0.5)


def test_fp8_scales_beside_the_parameters_are_kept():
    scales = "_overwrite_with_gradient"
    tx = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    params = {"params": {"w": jnp.zeros(2)}, scales: {"s": jnp.ones(1)}}
    state = emaopt.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    for value in (-1.0, -2.0):
        grads = {"params": {"w": jnp.full(2, value)}, scales: {"s": jnp.full(1, 5.0)}}
        state = state.apply_gradients(grads=grads)
    found = state.eval_variables()
    np.testing.assert_allclose(found["params"]["w"], 7 / 3, rtol=2 * oracles.ULP)
    assert found[scales]["s"] == 5


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_bfloat16_block_is_averaged_in_float32(rng):
    model = LinenBlock()
    x = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    tx = optax.chain(optax.sgd(0.5), emaopt.params_ema(0.99))

    @jax.jit
    def run(params):
        def scanned(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: (model.apply({"params": p}, x) ** 2).mean())(
                params
            )
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return lax.scan(scanned, (params, tx.init(params)), length=40)

    (last, state), history = run(params)
    average = emaopt.find_state(state)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(average.m))
    found = emaopt.eval_params(state, last)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
    assert_average(found, history, 0.99)


def test_the_state_of_a_mask_has_the_bytes_of_the_chosen_leaves(data):
    chosen = {"Conv_0": False, "BatchNorm_0": False, "Dense_0": True}
    average = optax.masked(emaopt.params_ema(0.9), chosen)
    state = start(tx=optax.chain(optax.sgd(0.1), average))
    found = emaopt.find_state(state.opt_state)
    dense = 4 * (4 * 3 + 3)
    assert nbytes(found.m) == dense
    assert nbytes(state.opt_state) == dense + 4 * (2 + 1 + 2) + 4
    state, history = train(state, data)
    params = state.eval_variables()["params"]
    assert_average(params["Dense_0"], history["params"]["Dense_0"], 0.9)
    assert_same(params["Conv_0"], state.params["Conv_0"])


def test_integers_in_a_collection_are_the_latest():
    state = emaopt.linen.TrainState.create(
        apply_fn=None,
        params={},
        tx=emaopt.params_ema(0.5),
        average={"stats": 0.5},
        stats={"mean": jnp.zeros(2), "seen": jnp.int32(0)},
    )
    for n in (1, 2):
        stats = {"mean": jnp.full(2, 2.0 * n - 1), "seen": jnp.int32(n)}
        state = state.apply_gradients(grads={}, stats=stats)
    found = state.eval_variables()["stats"]
    np.testing.assert_allclose(found["mean"], 7 / 3, rtol=2 * oracles.ULP)
    assert found["seen"] == 2
    assert found["seen"].dtype == jnp.int32
    assert nbytes(state.averages["stats"].m) == 8


def test_a_collection_that_is_not_finite_is_skipped_where_asked():
    kwargs = {"apply_fn": None, "params": {}, "tx": emaopt.params_ema(0.5)}
    kwargs |= {"average": {"stats": 0.5}, "stats": {"mean": jnp.zeros(())}}
    skips = emaopt.linen.TrainState.create(**kwargs, skip_nonfinite=True)
    takes = emaopt.linen.TrainState.create(**kwargs)
    for value in (1.0, np.nan, 3.0):
        stats = {"mean": jnp.float32(value)}
        skips = skips.apply_gradients(grads={}, stats=stats)
        takes = takes.apply_gradients(grads={}, stats=stats)
    found = skips.eval_variables()["stats"]["mean"]
    np.testing.assert_allclose(found, 7 / 3, rtol=2 * oracles.ULP)
    assert skips.averages["stats"].decay_power == 0.25
    assert np.isnan(takes.eval_variables()["stats"]["mean"])


def test_one_trace_for_any_number_of_steps(data):
    traces = 0

    @partial(jax.jit, donate_argnums=0)
    def counted(state, batch):
        nonlocal traces
        traces += 1
        return step(state, batch)

    # The state is donated: the first one of this test is its own.
    state = jax.tree.map(jnp.copy, start(statistics=0.9))
    types_before = jax.tree.map(lambda leaf: jax.typeof(leaf), state.averages)
    for batch in zip(*data, strict=True):
        state = counted(state, batch)
    assert traces == 1
    assert types_before == jax.tree.map(lambda leaf: jax.typeof(leaf), state.averages)


def test_evaluation_does_not_disturb_training(data):
    first, second = ([part[a:b] for part in data] for a, b in ((0, 3), (3, 6)))
    unbroken, _ = train(start(statistics=0.9), data)
    state, _ = train(start(statistics=0.9), first)
    state.apply_fn(state.eval_variables(), data[0][0], train=False)
    with pytest.raises(flax.errors.ScopeParamShapeError, match="Conv_0"):
        state.apply_fn(state.eval_variables(), data[0][0][:, :2, :2, 0], train=False)
    apply = partial(state.apply_fn, train=False, mutable=["batch_stats"])
    emaopt.linen.update_batch_stats(apply, state.eval_variables(), data[0][:2])
    state, _ = train(state, second)
    assert_same(state, unbroken)


def test_what_does_not_fit_is_named_and_the_state_stays(data):
    state = start(statistics=0.9)
    grads = jax.tree.map(jnp.ones_like, state.params)
    wrong = {"BatchNorm_0": {"mean": jnp.zeros(5), "var": jnp.zeros(4)}}
    named = r"batch_stats at \['BatchNorm_0'\]\['mean'\]: found shape \(5,\)"
    with pytest.raises(AssertionError, match=named):
        state.apply_gradients(grads=grads, batch_stats=wrong)
    named = r"batch_stats at \['BatchNorm_0'\]: found nothing"
    with pytest.raises(AssertionError, match=named):
        state.apply_gradients(grads=grads, batch_stats={})
    with pytest.raises(ValueError, match="got 'batch_stat'; given to create: 'batch_"):
        state.apply_gradients(grads=grads, batch_stat=state.batch_stats)
    state.apply_gradients(grads=grads, batch_stats=state.batch_stats)


def test_what_create_does_not_take(data):
    with pytest.raises(ValueError, match=r"average must name collections .* 'stats'"):
        emaopt.linen.TrainState.create(
            apply_fn=None, tx=TX, average={"stats": 0.9}, **variables()
        )
    with pytest.raises(
        ValueError, match=r"\['batch_stats'\] must be in \[0, 1\), got 1"
    ):
        start(statistics=1.5)
    kwargs = {"apply_fn": None, "tx": TX, "average": {"batch_stats": {"a": 0.9}}}
    with pytest.raises(TypeError, match="must be one number whose value is known"):
        emaopt.linen.TrainState.create(**kwargs, **variables())
    with pytest.raises(TypeError, match=r"key must be a collection .* got int"):
        start(key=3)
    with pytest.raises(
        AttributeError, match=r"'TrainState' object has no .*'spectral'"
    ):
        _ = start().spectral
    without = start(tx=optax.sgd(0.1))
    with pytest.raises(LookupError, match="found no average of parameters"):
        without.eval_variables()


def test_which_of_two_averages(data):
    tx = optax.named_chain(
        ("sgd", optax.sgd(0.1)),
        ("fast", emaopt.params_ema(0.5)),
        ("slow", emaopt.params_ema(0.9)),
    )
    state, history = train(start(tx=tx), data)
    for name, decay in (("fast", 0.5), ("slow", 0.9)):
        found = state.eval_variables(which=name)["params"]
        assert_average(found, history["params"], decay)
    with pytest.raises(LookupError, match="found 2 averages of the same leaves"):
        state.eval_variables()


WITHOUT_FLAX = """
import sys
import emaopt
assert not [name for name in sys.modules if name.split(".")[0] == "flax"]
sys.modules["flax"] = None
for name in ("linen", "nnx"):
    try:
        __import__(f"emaopt.{name}")
    except ImportError as error:
        print(error)
"""


def test_flax_is_imported_by_the_adapters_alone():
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLAX], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for name, line in zip(("linen", "nnx"), result.stdout.splitlines(), strict=True):
        expected = f'emaopt.{name} needs Flax, which is an extra: pip install "emaopt'
        assert line.startswith(expected + '[flax]"')
