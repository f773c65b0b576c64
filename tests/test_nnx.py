"""`emaopt.nnx`: the average of a model's Variables, evaluation models, errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax import nnx
from flax_models import (
    NNX_DECAY,
    NnxBlock,
    NnxCNN,
    Values,
    assert_average,
    assert_same,
    batches,
    history_of,
    nbytes,
    nnx_start,
    nnx_step,
    pure,
)

import emaopt
import emaopt.nnx

jitted_step = nnx.jit(nnx_step)


def train(trained, data):
    """Trains, and returns a copy of the model after every step."""
    models = []
    for batch in zip(*data, strict=True):
        jitted_step(*trained, *batch)
        models.append(nnx.clone(trained[0]))
    return models


@pytest.fixture(scope="module")
def data():
    return batches(np.random.default_rng(3), 6)


@pytest.fixture(scope="module")
def trained(data):
    """A model, its optimizer, its average, and the models on the way."""
    model, optimizer, ema = nnx_start()
    models = train((model, optimizer, ema), data)
    return model, optimizer, ema, models


def test_the_average_of_a_cnn_with_batch_norm_and_dropout(trained, data):
    model, optimizer, ema, models = trained
    history = history_of(models, nnx.Param)
    found = ema.apply_to(model)
    inside = emaopt.nnx.eval_model(optimizer, model)
    for one in (found, inside):
        assert_average(pure(nnx.state(one, nnx.Param)), history, NNX_DECAY)
        # What is not averaged is the latest, not that of the start.
        rest = nnx.Not(nnx.Param)
        assert_same(nnx.state(one, rest), nnx.state(model, rest))
        one.eval()
        assert_same(one(data[0][0]), one(data[0][0]))
    assert np.any(model.norm.mean[...] != 0)
    assert model.dropout.rngs.count[...] == 6


def test_an_evaluation_model_shares_nothing(trained):
    model, optimizer, ema, _ = trained
    before = jax.tree.map(jnp.copy, (nnx.state(model), nnx.state(ema)))
    for one in (ema.apply_to(model), emaopt.nnx.eval_model(optimizer, model)):
        assert type(one) is NnxCNN
        for found, live in zip(
            jax.tree.leaves(nnx.state(one), is_leaf=is_variable),
            jax.tree.leaves(nnx.state(model), is_leaf=is_variable),
            strict=True,
        ):
            assert found is not live
            assert type(found) is type(live)
            assert found.get_metadata() == live.get_metadata()
            assert found.dtype == live.dtype
        buffers = {id(leaf) for leaf in pure((nnx.state(model), nnx.state(ema)))}
        assert not buffers & {id(leaf) for leaf in pure(nnx.state(one))}
        one.conv.kernel[...] = jnp.zeros_like(one.conv.kernel[...])
        one.norm.mean[...] = jnp.zeros_like(one.norm.mean[...])
    assert_same((nnx.state(model), nnx.state(ema)), before)


def is_variable(node):
    return isinstance(node, nnx.Variable)


def test_the_average_does_not_alias_the_live_model():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    ema = emaopt.nnx.EMA(model, 0.5, warm_start=True)
    first = jnp.copy(model.kernel[...])
    model.kernel[...] = jnp.zeros((2, 3))
    assert_same(ema.apply_to(model).kernel[...], first)
    assert_same(model.kernel[...], jnp.zeros((2, 3)))


def test_statistics_are_averaged_where_the_filter_names_them(data):
    trained = nnx_start(only=(nnx.Param, nnx.BatchStat))
    models = train(trained, [part[:3] for part in data])
    model, _, ema = trained
    chosen = nnx.Any(nnx.Param, nnx.BatchStat)
    found = pure(nnx.state(ema.apply_to(model), chosen))
    assert_average(found, history_of(models, chosen), NNX_DECAY)


def test_evaluation_does_not_disturb_training(trained, data):
    unbroken = trained[:3]
    fresh = nnx_start()
    train(fresh, [part[:3] for part in data])
    model, optimizer, ema = fresh
    for averaged in (ema.apply_to(model), emaopt.nnx.eval_model(optimizer, model)):
        with pytest.raises((TypeError, ValueError), match="conv_general_dilated"):
            averaged(data[0][0][..., :0])
        emaopt.nnx.update_batch_stats(lambda m, x: m(x), averaged, data[0][:2])
    train(fresh, [part[3:] for part in data])
    for one, other in zip(fresh, unbroken, strict=True):
        assert_same(nnx.state(one), nnx.state(other))


def test_every_kind_of_decay(rng):
    values = rng.normal(size=(4, 1)).astype(np.float32)

    def averaged(decay):
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        ema = emaopt.nnx.EMA(model, decay)
        traces = []

        @nnx.jit
        def absorb(model, ema):
            traces.append(model)
            ema.update(model)

        for value in values:
            model.bias[...] = jnp.asarray(value)
            absorb(model, ema)
        assert len(traces) == 1
        return ema.apply_to(model).bias[...]

    for decay in (0.9, np.float32(0.9), jnp.float32(0.9), {"bias": 0.9, "kernel": 0.1}):
        assert_average(averaged(decay), values, 0.9)
    schedule = lambda count: (count + 1) / (count + 10)  # noqa: E731
    assert_average(averaged(schedule), values, (np.arange(4) + 1) / (np.arange(4) + 10))
    np.testing.assert_array_equal(averaged(0.0), values[-1])


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_bfloat16_block_with_an_average_of_its_adapters(rng):
    model = NnxBlock(nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.bfloat16)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.LoRAParam)
    ema = emaopt.nnx.EMA(model, 0.99, only=nnx.LoRAParam)
    adapters = (8 * 2 + 2 * 16) + (16 * 2 + 2 * 8)
    assert nbytes(ema.average.m) == 4 * adapters
    # Three scalars with two residuals, and nothing else.
    assert nbytes(nnx.state(ema)) == 4 * adapters + 4 * (2 + 1 + 2)

    @nnx.jit
    def train_step(model, optimizer, ema):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        grads = nnx.grad(lambda m: (m(x) ** 2).mean(), argnums=wrt)(model)
        optimizer.update(model, grads)
        ema.update(model)

    models = []
    for _ in range(20):
        train_step(model, optimizer, ema)
        models.append(nnx.clone(model))
    found = ema.apply_to(model)
    leaves = pure(nnx.state(found, nnx.LoRAParam))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert_average(leaves, history_of(models, nnx.LoRAParam), 0.99)
    rest = nnx.Not(nnx.LoRAParam)
    assert_same(nnx.state(found, rest), nnx.state(model, rest))


def test_bfloat16_does_not_stall():
    model = Values(w=nnx.Param(jnp.ones((), jnp.bfloat16)))
    ema = emaopt.nnx.EMA(model, 0.999)

    @partial(jax.jit, static_argnums=0)
    def many(graphdef, state, model_state):
        def body(_, state):
            ema = nnx.merge(graphdef, state)
            ema.update(nnx.merge(model_def, model_state))
            return nnx.state(ema)

        return jax.lax.fori_loop(0, 1000, body, state)

    graphdef, state = nnx.split(ema)
    for value in (1.0, 0.0):
        model.w[...] = jnp.asarray(value, jnp.bfloat16)
        model_def, model_state = nnx.split(model)
        state = many(graphdef, state, model_state)
    found = nnx.merge(graphdef, state).apply_to(model).w
    b = 0.999**1000
    expected = b * (1 - b) / (1 - b**2)
    # bfloat16 has a spacing of 2⁻⁹ there.
    error = abs(float(found[...]) - expected)
    assert error <= 2.0**-10 + 2e-5 * expected


def test_starts_and_reads():
    model = Values(w=nnx.Param(jnp.float32(4)), n=nnx.Variable(jnp.int32(7)))
    for kwargs in ({}, {"warm_start": True}, {"compensated": True}):
        ema = emaopt.nnx.EMA(model, 0.9, **kwargs)
        for _ in range(5):
            assert abs(ema.apply_to(model).w[...] - 4) <= 8 * oracles.ULP
            ema.update(model)
    raw = emaopt.nnx.EMA(model, 0.9, debias=False)
    assert raw.apply_to(model).w[...] == 4
    raw.update(model)
    found = raw.apply_to(model).w[...]
    np.testing.assert_allclose(found, 0.4, rtol=2 * oracles.ULP)
    found = raw.apply_to(model)
    assert found.n[...] == 7
    assert found.n[...].dtype == jnp.int32


def test_what_is_not_finite_is_skipped_where_asked():
    model = Values(w=nnx.Param(jnp.zeros(2)), v=nnx.Param(jnp.zeros(())))
    ema = emaopt.nnx.EMA(model, 0.5, skip_nonfinite=True)
    for value in (1.0, np.nan, 3.0):
        model.w[...] = jnp.full(2, value, jnp.float32)
        ema.update(model)
    found = ema.apply_to(model).w[...]
    np.testing.assert_allclose(found, 7 / 3, rtol=2 * oracles.ULP)
    assert ema.average.decay_power[...] == 0.25


def test_what_does_not_fit_is_named_and_the_average_stays():
    model = NnxCNN(nnx.Rngs(0))
    ema = emaopt.nnx.EMA(model, 0.9)
    ema.update(model)
    before = jax.tree.map(jnp.copy, nnx.state(ema))
    wrong = NnxCNN(nnx.Rngs(0))
    wrong.dense = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
    named = r"model at \['dense'\]\['bias'\]: found shape \(5,\), expected \(3,\)"
    for call in (ema.update, ema.apply_to, nnx.jit(ema.update)):
        with pytest.raises(AssertionError, match=named):
            call(wrong)
    del wrong.dense
    for call in (ema.update, ema.apply_to):
        with pytest.raises(AssertionError, match=r"\['dense'\]: found nothing"):
            call(wrong)
    assert_same(nnx.state(ema), before)
    with pytest.raises(AssertionError, match=r"params at \['dense'\]: found nothing"):
        emaopt.nnx.eval_model(
            nnx.Optimizer(model, emaopt.params_ema(0.9), wrt=nnx.Param), wrong
        )


def test_what_is_refused():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must select at least one Variable"):
        emaopt.nnx.EMA(model, 0.9, only=nnx.BatchStat)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1.0"):
        emaopt.nnx.EMA(model, 1.0)
    with pytest.raises(TypeError, match="debias must be True or False, got 1"):
        emaopt.nnx.EMA(model, 0.9, debias=1)
    with pytest.raises(ValueError, match="accumulator_dtype must be float32 or wider"):
        emaopt.nnx.EMA(model, 0.9, accumulator_dtype=jnp.bfloat16)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(LookupError, match="found no average of parameters"):
        emaopt.nnx.eval_model(optimizer, model)


def test_which_of_two_averages():
    model = Values(w=nnx.Param(jnp.float32(0)))
    averages = {name: emaopt.params_ema(b) for name, b in (("a", 0.0), ("b", 0.5))}
    tx = optax.named_chain(("sgd", optax.sgd(1.0)), *averages.items())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        grads = jax.tree.map(lambda _: jnp.float32(-1), nnx.state(model))
        optimizer.update(model, grads)
    for name, expected in (("a", 2), ("b", 5 / 3)):
        found = emaopt.nnx.eval_model(optimizer, model, which=name).w[...]
        np.testing.assert_allclose(found, expected, rtol=2 * oracles.ULP)


@pytest.mark.skipif(not hasattr(nnx, "EMA"), reason="this flax has no nnx.EMA")
@pytest.mark.standard_promotion
def test_the_same_as_the_average_of_flax_where_that_is_right(rng):
    values = rng.normal(size=(5, 2, 3)).astype(np.float32)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    theirs = nnx.EMA(model, 0.9)
    ours = emaopt.nnx.EMA(model, 0.9, warm_start=True)
    history = [jnp.copy(model.kernel[...])]
    for value in values:
        model.kernel[...] = jnp.asarray(value)
        history.append(value)
        theirs.update(model)
        ours.update(model)
    found, expected = ours.apply_to(model), theirs.apply_to(model)
    # A warm start gives the first value all the weight: β⁵, and the rest as ever.
    weights = np.array([0.9**5, *(0.1 * 0.9 ** np.arange(4, -1, -1))])
    exact = np.tensordot(weights, np.asarray(history, np.float64), axes=1)
    scale = np.tensordot(weights, np.abs(np.asarray(history, np.float64)), axes=1)
    assert np.all(np.abs(found.kernel[...] - exact) <= 8 * oracles.ULP * scale)
    assert np.all(np.abs(expected.kernel[...] - exact) <= 16 * oracles.ULP * scale)


def test_the_average_of_an_optimizer_is_read_by_eval_model():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.sgd(0.1), emaopt.params_ema(0.9))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for params in (nnx.state(model, nnx.Param), model):
        for state in (optimizer.opt_state, optimizer):
            with pytest.raises(AssertionError, match=r"nnx.eval_model\(optimizer, mo"):
                emaopt.eval_params(state, params)
    for wrong in (model, optimizer.opt_state):
        message = f"optimizer must be an nnx.Optimizer, got {type(wrong).__name__}: "
        with pytest.raises(TypeError, match=message):
            emaopt.nnx.eval_model(wrong, optimizer)
