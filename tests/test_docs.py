"""The documentation: what it lists, where it links to, and what it says of others."""

import inspect
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax import lax

import emaopt
import emaopt.linen
import emaopt.nnx
from emaopt import schedules

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "reference")
    for path in folder.glob("*.md")
)


def public_names():
    """`emaopt.__all__`, and what the public modules define."""
    names = {f"emaopt.{name}" for name in emaopt.__all__} - {"emaopt.schedules"}
    for module in (schedules, emaopt.linen, emaopt.nnx):
        names |= {
            f"{module.__name__}.{name}"
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        }
    return names


def test_every_public_name_is_in_the_reference_once():
    text = "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.rst"))
    documented = re.findall(r"^\.\. auto(?:function|class):: (\S+)$", text, re.M)
    assert sorted(documented) == sorted(public_names())


def test_every_public_method_is_in_the_reference():
    for part, cls in (("linen", emaopt.linen.TrainState), ("nnx", emaopt.nnx.EMA)):
        text = (ROOT / f"docs/reference/{part}.rst").read_text()
        members = re.search(rf"{cls.__name__}\n   :members: (.+)", text)[1]
        # What Flax adds to a class comes from elsewhere.
        own = {
            name
            for name, value in vars(cls).items()
            if not name.startswith("_")
            and getattr(inspect.unwrap(function_of(value)), "__module__", None)
            == cls.__module__
        }
        assert own == set(members.split(", "))


def function_of(value):
    """The function in a property or a class method; else the value itself."""
    return getattr(value, "fget", getattr(value, "__func__", value))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"https?:", target):
            built = page.parent / target.replace("notebooks/", "../examples/")
            assert (page.parent / target).exists() or built.exists(), target


def test_every_page_is_in_a_table_of_contents():
    index = (ROOT / "docs/index.md").read_text()
    trees = " ".join(re.findall(r"```\{toctree\}(.*?)```", index, re.S)).split()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.stem in trees or path.stem == "index", path
    for path in (ROOT / "examples").glob("*.ipynb"):
        assert f"notebooks/{path.stem}" in trees, path


# What "Moving from other libraries" says is the same: their published updates, in
# float64, on parameters that are given after each step. (T,) in, (T,) out.


def averaged_model(x, decay):
    """torch: the first call copies, every later one mixes."""
    out = [x[0]]
    for value in x[1:]:
        out.append(decay * out[-1] + (1 - decay) * value)
    return out


def averaged_model_uniform(x):
    """torch without an averaging function."""
    out = [x[0]]
    for n, value in enumerate(x[1:], start=1):
        out.append(out[-1] + (value - out[-1]) / (n + 1))
    return out


def ema_model(x, decay, after=0, warmup=None):
    """diffusers, and timm with the number of the step."""
    shadow, out = 0.0, []
    for call, value in enumerate(x, start=1):
        step = max(0, call - after - 1)
        now = decay
        if warmup:
            now = min(1 - (1 + step / warmup[0]) ** -warmup[1], decay)
        now = now if step > 0 else 0.0
        shadow = now * shadow + (1 - now) * value
        out.append(shadow)
    return out


def model_ema_v2(x, decay, first):
    """timm: a copy of the initial model, mixed from the first call on."""
    out = [first]
    for value in x:
        out.append(decay * out[-1] + (1 - decay) * value)
    return out[1:]


def ema_pytorch(x, beta, every, after, gamma, power):
    """ema-pytorch: copies until ``after``, then mixes every few calls."""
    shadow, out = x[0], []
    for call, value in enumerate(x):
        if call % every == 0:
            epoch = max(0, call + 1 - after - 1)
            now = min(1 - (1 + epoch / gamma) ** -power, beta) if epoch else 0.0
            now = 0.0 if call <= after else now
            shadow = now * shadow + (1 - now) * value
        out.append(shadow)
    return out


def ours(x, first, average):
    """`eval_params` after each call, of parameters that go through ``x``."""
    optimizer = optax.chain(optax.identity(), average)
    x, first = np.float32(x), np.float32(first)

    @jax.jit
    def run(x):
        def step(carry, value):
            params, state = carry
            updates, state = optimizer.update(value - params, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), emaopt.eval_params(state, params)

        return lax.scan(step, (first, optimizer.init(first)), x)[1]

    return np.asarray(run(x))


@pytest.fixture
def path(rng):
    """Parameters at 60 steps, and before the first."""
    x = 1 + 0.1 * rng.normal(size=61)
    return x[1:], x[0]


def agrees(path, theirs, average, calls=slice(None)):
    x, first = path
    found = ours(x, first, average)
    # Sixty steps of rounding, and the two of params + updates, at values near 1.
    np.testing.assert_allclose(found[calls], theirs[calls], rtol=8e-6)


def test_moving_from_torch(path):
    x, _ = path
    copied = emaopt.params_ema(0.9, start=1, warm_start=True)
    agrees(path, averaged_model(x, 0.9), copied)
    agrees(path, averaged_model_uniform(x), emaopt.params_ema(schedules.uniform()))
    once_in_4 = emaopt.params_ema(schedules.uniform(), start=20, every=4)
    late = averaged_model_uniform(x[23::4])
    agrees((x[23::4], x[22]), late, emaopt.params_ema(schedules.uniform()))
    found = ours(x, path[1], once_in_4)[23::4]
    np.testing.assert_allclose(found, late, rtol=8e-6)


def test_moving_from_timm_and_diffusers(path):
    x, first = path
    agrees(
        path,
        model_ema_v2(x, 0.9, first),
        emaopt.params_ema(0.9, warm_start=True),
    )
    rising = schedules.inverse_gamma(2.0, 0.75, max_decay=0.95)
    agrees(path, ema_model(x, 0.95, 0, (2.0, 0.75)), emaopt.params_ema(rising))
    agrees(
        path,
        ema_model(x, 0.95, 10, (2.0, 0.75)),
        emaopt.params_ema(rising, start=10),
    )
    agrees(path, ema_model(x, 0.9), emaopt.params_ema(0.9, start=1, warm_start=True))
    agrees(
        path,
        ema_model(x, 0.9, after=10),
        emaopt.params_ema(0.9, start=11, warm_start=True),
    )


def test_moving_from_ema_pytorch(path):
    x, _ = path
    every, after = 5, 20
    rising = schedules.inverse_gamma(2.0 / every, 0.75, max_decay=0.95)
    average = emaopt.params_ema(rising, every=every, start=after + 1 - every)
    theirs = ema_pytorch(x, 0.95, every, after, 2.0, 0.75)
    agrees(path, theirs, average, slice(after, None))
    per_absorption = emaopt.params_ema(0.8 ** (1 / every), every=every)
    x_absorbed = x[every - 1 :: every]
    kept = 1 - 0.8 ** np.arange(1, len(x_absorbed) + 1)
    expected = np.array(model_ema_v2(x_absorbed, 0.8, 0.0)) / kept
    found = ours(x, path[1], per_absorption)[every - 1 :: every]
    np.testing.assert_allclose(found, expected, rtol=8e-6)
