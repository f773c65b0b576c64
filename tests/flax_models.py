"""Small models in both Flax APIs, data for them, and what their average should be."""

import importlib.util
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
from flax import nnx

import emaopt.nnx

CLASSES = 3
NNX_DECAY = 0.8


def batches(rng, steps, size=8):
    """Images (steps, size, 6, 6, 1) and labels (steps, size)."""
    images = rng.normal(1, 2, size=(steps, size, 6, 6, 1)).astype(np.float32)
    labels = rng.integers(CLASSES, size=(steps, size), dtype=np.int32)
    return jnp.asarray(images), jnp.asarray(labels)


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(4, (3, 3))(images)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x).mean(axis=(1, 2))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


class NnxCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images))).mean(axis=(1, 2))
        return self.dense(self.dropout(x))


class Values(nnx.Module):
    """Variables, and nothing else."""

    def __init__(self, **variables):
        for name, variable in variables.items():
            setattr(self, name, variable)


def pure(tree):
    """The arrays of ``tree``, in the order of its leaves."""
    return jax.tree.leaves(tree)


def nnx_step(model, optimizer, ema, images, labels):
    grads = nnx.grad(lambda model: mean_loss(model(images), labels))(model)
    optimizer.update(model, grads)
    ema.update(model)


def nnx_start(**kwargs):
    model = NnxCNN(nnx.Rngs(0))
    tx = optax.chain(optax.sgd(0.1), emaopt.params_ema(NNX_DECAY))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return model, optimizer, emaopt.nnx.EMA(model, NNX_DECAY, **kwargs)


def history_of(models, *filters):
    """The leaves of the models' Variables, stacked."""
    states = [pure(nnx.state(model, *filters)) for model in models]
    return [np.stack(leaves) for leaves in zip(*states, strict=True)]


class LinenBlock(nn.Module):
    """A transformer block, parameters and activations in bfloat16."""

    @nn.compact
    def __call__(self, x):
        low = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        h = nn.LayerNorm(**low)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, **low)(h, h)
        h = nn.Dense(16, **low)(nn.LayerNorm(**low)(x))
        return x + nn.Dense(8, **low)(nn.gelu(h))


class NnxBlock(nnx.Module):
    """The same in nnx, with low-rank adapters on its dense layers."""

    def __init__(self, rngs):
        low = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.first_norm = nnx.LayerNorm(8, **low)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, **low)
        self.second_norm = nnx.LayerNorm(8, **low)
        self.up = nnx.LoRALinear(
            8, 16, lora_rank=2, lora_param_dtype=jnp.bfloat16, **low
        )
        self.down = nnx.LoRALinear(
            16, 8, lora_rank=2, lora_param_dtype=jnp.bfloat16, **low
        )

    def __call__(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.down(nnx.gelu(self.up(self.second_norm(x))))


def assert_average(found, history, decay):
    """``found`` is the corrected average of ``history`` (steps, ...), leaf by leaf.

    The state is float32: a step rounds by a spacing at most, and reading it by two.
    What is read is rounded to the dtype of the model once more.
    """
    found, history = jax.tree.leaves(found), jax.tree.leaves(history)
    for leaf, values in zip(found, history, strict=True):
        values = np.asarray(values).astype(np.float64)
        expected = oracles.ema(values, decay).corrected[-1]
        scale = oracles.ema(np.abs(values), decay).corrected[-1]
        steps = values.shape[0]
        last = 0 if leaf.dtype == np.float32 else float(jnp.finfo(leaf.dtype).eps) / 2
        bound = ((steps + 2) * oracles.ULP + last) * scale
        error = np.abs(np.asarray(leaf).astype(np.float64) - expected)
        assert np.all(error <= bound)


def assert_same(found, expected):
    """Two trees are equal bit for bit, structure and dtypes included."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(getattr(a, "dtype", np.float32), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def example(name):
    """A script of examples/ as a module."""
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
