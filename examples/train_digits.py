"""Trains a small Flax model on handwritten digits and averages its parameters.

Three in ten training labels are random and the learning rate is high, so the model
never settles: its accuracy on held-out digits jumps from epoch to epoch. The
exponential moving average of its parameters, kept by the optimizer, does not.

    python examples/train_digits.py --epochs 20 --seed 0 --decay 0.998

prints one row an epoch and writes a plot. The three columns of accuracy are of

    raw          the parameters that are being trained
    averaged     emaopt.eval_params: their average, corrected for its start at zero
    uncorrected  emaopt.find_state(...).m: the same average as it is stored
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import emaopt

CLASSES = 10
HELD_OUT = 500
BATCH = 16
LEARNING_RATE = 0.3
RANDOM_LABELS = 0.3
COLUMNS = ("raw", "averaged", "uncorrected")


class Classifier(nnx.Module):
    """Two hidden layers of 64 units."""

    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.logits = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.logits(nnx.relu(self.second(nnx.relu(self.first(images)))))


def noisy_digits(rng):
    """Images and labels to train on, some labels random, and held-out ones to test."""
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16, labels.astype(np.int32)
    order = rng.permutation(len(labels))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    random = rng.integers(CLASSES, size=len(labels), dtype=np.int32)
    noisy = np.where(rng.random(len(labels)) < RANDOM_LABELS, random, labels)
    return (images[train], noisy[train]), (images[test], labels[test])


def train(epochs, seed, decay):
    """The accuracies after each epoch, shape (epochs, 3), in the order of COLUMNS."""
    rng = np.random.default_rng(seed)
    (images, labels), (test_images, test_labels) = noisy_digits(rng)
    model, params = nnx.split(Classifier(nnx.Rngs(seed)), nnx.Param)

    # The average is the last link of the chain: there the updates are final, and
    # params + updates are the parameters after this step.
    optimizer = optax.chain(optax.sgd(LEARNING_RATE), emaopt.params_ema(decay))
    opt_state = optimizer.init(params)

    def mean_loss(params, images, labels):
        logits = nnx.merge(model, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    @partial(jax.jit, donate_argnames=("params", "opt_state"))
    def train_step(params, opt_state, images, labels):
        grads = jax.grad(mean_loss)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def accuracy(params):
        guesses = nnx.merge(model, params)(test_images).argmax(axis=-1)
        return (guesses == test_labels).mean()

    history = []
    tqdm.write("epoch" + "".join(f"{name:>13}" for name in COLUMNS))
    steps = len(labels) // BATCH
    with tqdm(total=epochs * steps, unit="step", leave=False, disable=None) as progress:
        for epoch in range(1, epochs + 1):
            order = rng.permutation(len(labels))[: steps * BATCH]
            for batch in order.reshape(steps, BATCH):
                params, opt_state = train_step(
                    params, opt_state, images[batch], labels[batch]
                )
                progress.update()
            averaged = emaopt.eval_params(opt_state, params)
            uncorrected = emaopt.find_state(opt_state).m
            row = [float(accuracy(p)) for p in (params, averaged, uncorrected)]
            tqdm.write(table_row(epoch, row))
            history.append(row)
    return np.array(history)


def table_row(head, values):
    return f"{head:>5}" + "".join(f"{value:13.1%}" for value in values)


def plot(history, decay, path):
    """Writes the error of each column against the epoch, on a logarithmic axis."""
    epochs, errors = np.arange(1, len(history) + 1), 100 * (1 - history)
    raw, averaged, uncorrected = errors.T
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(epochs, raw, "o-", color="tab:orange", lw=1.2, ms=4, label="raw")
    axes.plot(epochs, averaged, color="tab:blue", lw=3, label="averaged")
    axes.plot(epochs, uncorrected, "k--", lw=1.2, label="averaged, uncorrected")
    axes.set_title(
        f"A model in training and the average of its parameters, β = {decay:g}"
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("held-out digits misread")
    axes.set_yscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_yticks(ticks, [f"{tick} %" for tick in ticks])
    axes.set_ylim(max(0.8 * errors.min(), 0.5), 105)
    axes.minorticks_off()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.998, help="per step")
    parser.add_argument("--plot", type=Path, default=Path("averaged_digits.png"))
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs: expected at least 1, found {args.epochs}")

    history = train(args.epochs, args.seed, args.decay)
    last = history[-5:]
    print(table_row("mean", last.mean(axis=0)), f"  of the last {len(last)}")
    plot(history, args.decay, args.plot)
    print(f"plot: {args.plot.resolve()}")


if __name__ == "__main__":
    main()
