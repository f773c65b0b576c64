"""Batch statistics for averaged parameters, in both Flax APIs, and the examples."""

import sys
import types
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import LinenCNN, assert_same, batches, example

import emaopt.linen
import emaopt.nnx


@cache
def variables():
    images = jnp.ones((8, 6, 6, 1))
    return jax.jit(partial(LinenCNN().init, train=False))(jax.random.key(0), images)


@pytest.fixture
def data(rng):
    return batches(rng, 3)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, name="first")(x)
        x = nn.SpectralNorm(nn.Dense(2), name="dense")(x, update_stats=train)
        return nn.BatchNorm(use_running_average=not train, name="second")(x)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.standard_promotion
def test_linen_statistics_are_means_over_batches(rng, train):
    inputs = rng.normal(3, 2, size=(5, 7, 3)).astype(np.float32)
    model = Normed()
    variables = model.init(jax.random.key(0), inputs[0], train=False)
    stats = variables["batch_stats"]
    stats = {**stats, "first": {"mean": jnp.full(3, jnp.nan), "var": jnp.ones(3)}}
    variables = {**variables, "batch_stats": stats}
    apply = partial(model.apply, train=train, mutable=["batch_stats"])
    found = emaopt.linen.update_batch_stats(apply, variables, iter(inputs))
    exact = inputs.astype(np.float64)
    first = found["batch_stats"]["first"]
    # Flax has the variance as E x² − (E x)², in float32, here of numbers up to 13².
    np.testing.assert_allclose(first["mean"], exact.mean(axis=(0, 1)), rtol=2e-6)
    np.testing.assert_allclose(first["var"], exact.var(axis=1).mean(axis=0), rtol=2e-5)
    # Other state in the collection is kept, and with it what the norm behind sees.
    assert_same(found["batch_stats"]["dense"], stats["dense"])
    second = found["batch_stats"]["second"]
    assert not np.array_equal(second["mean"], stats["second"]["mean"])
    assert_same(found["params"], variables["params"])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return 2 * nn.BatchNorm(use_running_average=True, epsilon=0.0)(x) + 1, None


def test_linen_statistics_of_layers_in_a_scan(rng):
    axes = {"params": 0, "batch_stats": 0}
    layers = nn.scan(nn.remat(Layer), axes, split_rngs={"params": True}, length=3)
    model = layers()
    inputs = rng.normal(size=(4, 6, 2)).astype(np.float32)
    variables = model.init(jax.random.key(0), inputs[0], None)

    def apply(variables, x):
        return model.apply(variables, x, None, mutable=["batch_stats"])

    found = emaopt.linen.update_batch_stats(apply, variables, inputs)
    (stats,) = found["batch_stats"].values()
    exact = inputs.astype(np.float64)
    # Each layer behind the first sees 2·(standardised) + 1.
    mean = [exact.mean(axis=(0, 1)), np.ones(2), np.ones(2)]
    var = [exact.var(axis=1).mean(axis=0), np.full(2, 4), np.full(2, 4)]
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(stats["var"], var, rtol=1e-5)


def test_linen_needs_batches_and_batch_norms(data):
    apply = partial(LinenCNN().apply, train=False, mutable=["batch_stats"])
    with pytest.raises(ValueError, match="at least one batch, got none"):
        emaopt.linen.update_batch_stats(apply, variables(), [])
    apply = jax.jit(apply)
    apply(variables(), data[0][0])
    with pytest.raises(ValueError, match=r"found no flax\.linen\.BatchNorm that apply"):
        emaopt.linen.update_batch_stats(apply, variables(), data[0])
    with pytest.raises(TypeError, match="progress must be True or False, got 1"):
        emaopt.linen.update_batch_stats(apply, variables(), data[0], progress=1)


def test_a_progress_bar_where_tqdm_is_there(data, monkeypatch):
    seen = []

    def bar(batches, **options):
        seen.append(options)
        return batches

    apply = partial(LinenCNN().apply, train=False, mutable=["batch_stats"])
    run = partial(emaopt.linen.update_batch_stats, apply, variables(), data[0])
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=bar))
    expected = run()
    assert [options["desc"] for options in seen] == ["batch statistics"]
    assert_same(run(progress=False), expected)
    assert len(seen) == 1
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert_same(run(), expected)


def test_nnx_statistics_are_means_over_batches(rng):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    inputs = rng.normal(3, 2, size=(5, 7, 3)).astype(np.float32)
    model = Model(nnx.Rngs(0))
    model.norm.mean[...] = jnp.full(3, jnp.nan)
    rest = nnx.Not(nnx.BatchStat)
    before = jax.tree.map(jnp.copy, nnx.state(model, rest))
    emaopt.nnx.update_batch_stats(lambda m, x: m(x), model, inputs)
    exact = inputs.astype(np.float64)
    # Flax has the variance as E x² − (E x)², in float32, here of numbers up to 13².
    mean, var = model.norm.mean[...], model.norm.var[...]
    np.testing.assert_allclose(mean, exact.mean(axis=(0, 1)), rtol=2e-6)
    np.testing.assert_allclose(var, exact.var(axis=1).mean(axis=0), rtol=2e-5)
    assert model.norm.use_running_average
    assert model.norm.momentum == 0.99
    assert_same(nnx.state(model, rest), before)
    with pytest.raises(ValueError, match="at least one batch, got none"):
        emaopt.nnx.update_batch_stats(lambda m, x: m(x), model, [])
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"found no flax\.nnx\.BatchNorm that model"):
        emaopt.nnx.update_batch_stats(lambda m, x: m(x), linear, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_batchnorm", "nnx_batchnorm"])
def test_the_examples_average_better_than_they_train(name, capsys):
    module = example(name)
    history = module.train(epochs=8, seed=0, decay=0.98)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["epoch", *module.COLUMNS]
    assert [row.split()[0] for row in rows] == list("12345678")
    raw, *averages = history[4:].mean(axis=0)
    assert raw > 0.5
    assert all(average > raw + 0.01 for average in averages)


@pytest.mark.parametrize("name", ["linen_batchnorm", "nnx_batchnorm"])
def test_the_examples_print_their_tables(name, capsys):
    module = example(name)
    module.train = lambda epochs, seed, decay: np.full((epochs, 4), decay)
    module.main(["--epochs", "7", "--decay", "0.5"])
    assert "mean       50.0%       50.0%" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        module.main(["--epochs", "0"])
    assert "--epochs: expected at least 1, found 0" in capsys.readouterr().err
