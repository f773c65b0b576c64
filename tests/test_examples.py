"""The scripts of examples/: that they run, and that they show what they claim."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def digits():
    """The main job, `examples/train_digits.py`, as a module."""
    spec = importlib.util.spec_from_file_location(
        "train_digits", EXAMPLES / "train_digits.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(text):
    """The header and the rows {head: values} of the printed table."""
    header, *lines = text.splitlines()
    rows = {}
    for line in lines:
        if found := re.fullmatch(r" *(\w+)((?: +\d+\.\d%){3})(?:   of the .*)?", line):
            rows[found[1]] = [float(v.rstrip("%")) for v in found[2].split()]
    return header.split(), rows


def test_digits_prints_its_table_and_writes_its_plot(digits, tmp_path, capsys):
    path = tmp_path / "curves.png"
    digits.main(["--epochs", "2", "--seed", "1", "--plot", str(path)])
    out = capsys.readouterr().out
    header, rows = table(out)
    assert header == ["epoch", "raw", "averaged", "uncorrected"]
    assert list(rows) == ["1", "2", "mean"]
    np.testing.assert_allclose(
        rows["mean"], np.mean([rows["1"], rows["2"]], axis=0), atol=0.101
    )
    raw, averaged, uncorrected = rows["1"]
    # Ten classes: m after one epoch of 81 steps has 15 % of its weight and guesses.
    assert uncorrected < 30 < 60 < min(raw, averaged)
    assert f"plot: {path}" in out.splitlines()
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 10_000


def test_digits_without_memory_the_average_is_the_parameters(digits):
    raw, averaged, uncorrected = digits.train(epochs=1, seed=0, decay=0.0).T
    np.testing.assert_array_equal(averaged, raw)
    np.testing.assert_array_equal(uncorrected, raw)


def test_digits_holds_out_clean_labels_and_replaces_three_in_ten(digits):
    (images, noisy), (held_out, labels) = digits.noisy_digits(np.random.default_rng(3))
    every, truth = load_digits(return_X_y=True)
    known = {
        image.tobytes(): label
        for image, label in zip(every.astype(np.float32) / 16, truth, strict=True)
    }
    assert len(images) + len(held_out) == len(every)
    np.testing.assert_array_equal([known[x.tobytes()] for x in held_out], labels)
    wrong = np.mean(
        [known[x.tobytes()] != y for x, y in zip(images, noisy, strict=True)]
    )
    # A random label is wrong nine times in ten; four standard deviations of 1,297.
    assert abs(wrong - 0.27) < 4 * np.sqrt(0.27 * 0.73 / len(images))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs: expected at least 1, found 0"),
        (["--seed", "one"], "argument --seed: invalid int value: 'one'"),
    ],
)
def test_digits_refuses_bad_arguments(digits, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        digits.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_digits_the_average_is_the_better_model_over_five_seeds(digits):
    history = np.array([digits.train(20, seed, decay=0.998) for seed in range(5)])
    raw, averaged, _ = history[:, -5:].mean(axis=1).T
    # Measured: 4.4 to 6.8 points, 5.1 on average.
    assert np.all(averaged > raw)
    assert np.mean(averaged - raw) > 0.03
    jumps = history[:, 10:].std(axis=1).mean(axis=0)
    assert jumps[1] < jumps[0] / 3
