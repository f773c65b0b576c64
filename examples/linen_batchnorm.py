"""Averages the parameters of a Flax linen model with BatchNorm and Dropout.

Three in ten training labels are random and the learning rate is high. The averaged
parameters need batch statistics of their own, and there are three ways to have them:

    python examples/linen_batchnorm.py --epochs 8 --seed 0 --decay 0.98

prints the accuracy on held-out digits after each epoch of

    raw         the parameters and statistics in training
    latest      the averaged parameters, with the latest statistics
    averaged    the averaged parameters, with the average of the statistics
    recomputed  the averaged parameters, with statistics from another pass over the
                training images, by emaopt.linen.update_batch_stats
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import emaopt
import emaopt.linen

CLASSES = 10
HELD_OUT = 500
BATCH = 32
LEARNING_RATE = 0.5
RANDOM_LABELS = 0.3
COLUMNS = ("raw", "latest", "averaged", "recomputed")


class Classifier(nn.Module):
    """Two convolutions, each with a BatchNorm, and a dense layer after Dropout."""

    @nn.compact
    def __call__(self, images, train):
        x = images
        for features in (8, 16):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(CLASSES)(x)


def noisy_digits(rng):
    """Images and labels to train on, some labels random, and held-out ones to test."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 8, 8, 1) / 16
    labels = labels.astype(np.int32)
    order = rng.permutation(len(labels))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    random = rng.integers(CLASSES, size=len(labels), dtype=np.int32)
    noisy = np.where(rng.random(len(labels)) < RANDOM_LABELS, random, labels)
    return (images[train], noisy[train]), (images[test], labels[test])


@partial(jax.jit, donate_argnums=0)
def train_epoch(state, key, images, labels):
    """One step for each batch: images (steps, batch, 8, 8, 1)."""

    def step(state, batch):
        images, labels = batch
        dropout = jax.random.fold_in(key, state.step)

        def mean_loss(params):
            logits, updates = state.apply_fn(
                {"params": params, **state.collections},
                images,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": dropout},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updates

        grads, updates = jax.grad(mean_loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **updates), None

    return jax.lax.scan(step, state, (images, labels))[0]


def train(epochs, seed, decay):
    """The accuracies after each epoch, shape (epochs, 4), in the order of COLUMNS."""
    rng = np.random.default_rng(seed)
    (images, labels), (test_images, test_labels) = noisy_digits(rng)
    model = Classifier()
    key, init_key = jax.random.split(jax.random.key(seed))
    variables = jax.jit(partial(model.init, train=False))(init_key, images[:1])

    state = emaopt.linen.TrainState.create(
        apply_fn=model.apply,
        tx=optax.chain(optax.sgd(LEARNING_RATE), emaopt.params_ema(decay)),
        average={"batch_stats": decay},
        **variables,
    )
    state = state.replace(step=jnp.int32(0))

    @jax.jit
    def accuracy(variables):
        guesses = model.apply(variables, test_images, train=False).argmax(axis=-1)
        return (guesses == test_labels).mean()

    # BatchNorm takes the statistics of each batch here; Dropout stays off.
    apply = partial(model.apply, train=False, mutable=["batch_stats"])
    steps = len(labels) // BATCH
    history = []
    tqdm.write("epoch" + "".join(f"{name:>12}" for name in COLUMNS))
    for epoch in tqdm(range(1, epochs + 1), unit="epoch", leave=False, disable=None):
        order = rng.permutation(len(labels))[: steps * BATCH].reshape(steps, BATCH)
        state = train_epoch(state, key, images[order], labels[order])
        averaged = state.eval_variables()
        latest = {**averaged, "batch_stats": state.batch_stats}
        recomputed = emaopt.linen.update_batch_stats(
            apply, averaged, images[order], progress=False
        )
        rows = (state.variables, latest, averaged, recomputed)
        history.append([float(accuracy(variables)) for variables in rows])
        tqdm.write(table_row(epoch, history[-1]))
    return np.array(history)


def table_row(head, values):
    return f"{head:>5}" + "".join(f"{value:12.1%}" for value in values)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.98, help="per step")
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs: expected at least 1, found {args.epochs}")
    last = train(args.epochs, args.seed, args.decay)[-5:]
    print(table_row("mean", last.mean(axis=0)), f"  of the last {len(last)}")


if __name__ == "__main__":
    main()
