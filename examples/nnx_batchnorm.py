"""Averages the Variables of a Flax nnx model with BatchNorm and Dropout.

Three in ten training labels are random and the learning rate is high. The averaged
parameters need batch statistics of their own, and there are three ways to have them:

    python examples/nnx_batchnorm.py --epochs 8 --seed 0 --decay 0.98

prints the accuracy on held-out digits after each epoch of

    raw         the model in training
    latest      emaopt.nnx.EMA(model, decay): averaged, with the latest statistics
    averaged    emaopt.nnx.EMA(..., only=(nnx.Param, nnx.BatchStat)): those averaged too
    recomputed  averaged, with statistics from another pass over the training images,
                by emaopt.nnx.update_batch_stats
"""

import argparse

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import tqdm

import emaopt.nnx

CLASSES = 10
HELD_OUT = 500
BATCH = 32
LEARNING_RATE = 0.5
RANDOM_LABELS = 0.3
COLUMNS = ("raw", "latest", "averaged", "recomputed")


class Classifier(nnx.Module):
    """Two convolutions, each with a BatchNorm, and a dense layer after Dropout."""

    def __init__(self, rngs):
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.first_norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.second_norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.logits = nnx.Linear(2 * 2 * 16, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.first_norm(self.first(images)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.second_norm(self.second(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.logits(self.dropout(x.reshape(len(x), -1)))


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


@nnx.jit
def train_step(model, optimizer, averages, images, labels):
    def mean_loss(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    grads = nnx.grad(mean_loss)(model)
    optimizer.update(model, grads)
    for average in averages:
        average.update(model)


@nnx.jit
def accuracy(model, images, labels):
    return (model(images).argmax(axis=-1) == labels).mean()


def train(epochs, seed, decay):
    """The accuracies after each epoch, shape (epochs, 4), in the order of COLUMNS."""
    rng = np.random.default_rng(seed)
    (images, labels), test = noisy_digits(rng)
    model = Classifier(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)
    ema = emaopt.nnx.EMA(model, decay)
    ema_of_both = emaopt.nnx.EMA(model, decay, only=(nnx.Param, nnx.BatchStat))

    steps = len(labels) // BATCH
    history = []
    tqdm.write("epoch" + "".join(f"{name:>12}" for name in COLUMNS))
    for epoch in tqdm(range(1, epochs + 1), unit="epoch", leave=False, disable=None):
        order = rng.permutation(len(labels))[: steps * BATCH].reshape(steps, BATCH)
        model.train()
        for batch in order:
            train_step(
                model, optimizer, [ema, ema_of_both], images[batch], labels[batch]
            )
        model.eval()
        latest, averaged = ema.apply_to(model), ema_of_both.apply_to(model)
        recomputed = ema.apply_to(model)
        emaopt.nnx.update_batch_stats(
            Classifier.__call__, recomputed, images[order], progress=False
        )
        models = (model, latest, averaged, recomputed)
        history.append([float(accuracy(one, *test)) for one in models])
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
