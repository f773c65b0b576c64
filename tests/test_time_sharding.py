"""``scan`` with time over the devices of a mesh: results, places, traffic, slopes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import ULP, ema

import emaopt

SHARDS, STEPS, D = 8, 2400, 3
STARTS = np.arange(STEPS) % (STEPS // SHARDS) == 0
COLLECTIVE = r" = (.*?) (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\("

slow = pytest.mark.slow


def line(kind=AxisType.Auto):
    return jax.make_mesh((SHARDS,), ("time",), (kind,))


def grid(*names, kind=AxisType.Auto):
    return jax.make_mesh((2, 4), names, (kind,) * 2)


def sharded(mesh, axis_name="time", **options):
    """``sharded_scan``, compiled, with masks as arguments."""
    run = functools.partial(emaopt.sharded_scan, mesh, axis_name, **options)
    return jax.jit(lambda state, x, decay, **masks: run(state, x, decay, **masks))


def collectives(compiled):
    """The kind of each collective, and how many numbers come out of it."""

    def size(shapes):
        dims = re.findall(r"\[([\d,]*)\]", shapes)
        return sum(math.prod(map(int, filter(None, d.split(",")))) for d in dims)

    found = re.findall(COLLECTIVE, compiled.as_text())
    return sorted((kind, size(shapes)) for shapes, kind in found)


def gathers(*sizes):
    """As ``collectives``; what can not be gathered, before jax 0.10, is summed."""
    if jax.__version_info__ < (0, 10):
        return [("all-reduce", sum(sizes))]
    return [("all-gather", size) for size in sizes]


@pytest.fixture
def values(rng):
    """Noise, a constant, and 12 decades in falling order."""
    fall = 10 ** np.linspace(6, -6, STEPS)
    columns = rng.normal(size=STEPS), np.full(STEPS, 0.1), fall
    return np.stack(columns, 1).astype(np.float32)


def start(**options):
    return emaopt.init(jnp.zeros(D), **options)


def assert_near(found, expected, size):
    """Within 8 units of 2⁻²³ of ``size``, NaN where NaN is expected."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    error = np.nan_to_num(np.abs(found - expected))
    assert np.all(error <= 8 * ULP * np.nan_to_num(size))


def assert_right(found, values, decay, observed=True, reset=False, **options):
    """The averages and the final state are those of the recurrence in float64."""
    order = slice(None, None, -1 if options.pop("reverse", False) else 1)
    decay, observed, reset = (
        part[order] if np.ndim(part) else part for part in (decay, observed, reset)
    )
    masks = {"observed": observed, "reset": reset, **options}
    exact = ema(values[order], decay, **masks)
    size = ema(np.abs(values[order]), decay, **masks)
    state, averages = found
    assert_near(averages[order], exact.corrected, size.corrected)
    assert_near(state.m, exact.m[-1], size.m[-1])
    weight, power = exact.weight[-1], exact.decay_power[-1]
    assert_near(np.broadcast_to(state.weight, weight.shape), weight, weight)
    found = np.broadcast_to(state.decay_power, power.shape)
    assert_near(found, power, np.maximum(power, 1e-6))
    held = np.ndim(observed) == 1 and options.get("unobserved") == "hold"
    assert state.count == (observed.sum() if held else len(values))


@pytest.mark.parametrize(
    "method",
    ["scan", *(pytest.param(m, marks=slow) for m in ("associative", "blocked"))],
)
def test_the_bound_at_any_decay(method, values):
    run = sharded(line(), method=method)
    for decay in np.float32([0, 0.5, 0.999, 0.999999]):
        assert_right(run(start(), values, decay), values, decay)


@pytest.mark.parametrize("decay", [0.0, 0.999999])
def test_the_bound_at_known_decays(decay, values):
    run = functools.partial(emaopt.sharded_scan, line(), "time", decay=decay)
    assert_right(jax.jit(lambda x: run(start(), x))(values), values, decay)


@pytest.mark.parametrize(
    ("method", "unobserved", "reverse", "fine"),
    [
        ("scan", "hold", False, False),
        ("scan", "decay", True, True),
        pytest.param("scan", "decay", True, False, marks=slow),
        pytest.param("scan", "hold", True, True, marks=slow),
        pytest.param("scan", "decay", False, True, marks=slow),
        pytest.param("associative", "decay", False, False, marks=slow),
    ],
)
def test_masks_resets_and_decays_in_time(
    method, unobserved, reverse, fine, values, rng
):
    shape = (STEPS, D) if fine else (STEPS,)
    options = {"unobserved": unobserved, "reverse": reverse}
    run = sharded(line(), method=method, **options)
    seen = rng.uniform(size=shape) < 0.4
    seen[:2] = seen[-2:] = False
    seen[1500] = True
    seen[600:1250] = False  # two shards and the begin of a third
    values[~seen] = np.nan
    decays = np.float32(rng.uniform(0.3, 1, shape))
    decays[1500] = 0
    resets = rng.uniform(size=STEPS) < 0.002
    for reset in (np.zeros(STEPS, bool), resets, STARTS, np.roll(STARTS, -1)):
        found = run(start(per_element=fine), values, decays, observed=seen, reset=reset)
        assert_right(found, values, decays, seen, reset, **options)


def harmonic(count):
    return 1 - 1 / (count.astype(np.float32) + 2)


@pytest.mark.parametrize(
    ("unobserved", "reverse"), [("hold", True), ("hold", False), ("decay", True)]
)
def test_schedules_are_called_with_the_count_of_all_shards(
    unobserved, reverse, values, rng
):
    options = {"unobserved": unobserved, "reverse": reverse}
    seen = rng.uniform(size=STEPS) < 0.6
    scan = functools.partial(emaopt.sharded_scan, line(), "time", start(), **options)
    found = jax.jit(lambda x, seen: scan(x, harmonic, observed=seen))(values, seen)
    order = slice(None, None, -1 if reverse else 1)
    counted = np.int32(seen[order] if unobserved == "hold" else np.ones(STEPS))
    decays = harmonic((np.cumsum(counted) - counted)[order])
    assert_right(found, values, decays, seen, **options)


def test_known_decays_in_time_lose_no_digit():
    # In float32 they would round to 1, and nothing would ever enter the average.
    x, decays = np.float32(np.arange(1, SHARDS + 1)), np.full(SHARDS, 1 - 1e-9)
    run = functools.partial(emaopt.sharded_scan, line(), "time", decay=decays)
    state, found = jax.jit(lambda x: run(emaopt.init(x[0]), x))(x)
    np.testing.assert_allclose(found, (x + 1) / 2, rtol=8 * ULP)
    np.testing.assert_allclose(state.weight, SHARDS * 1e-9, rtol=8 * ULP)


def test_steps_of_long_shards_are_counted():
    x = np.ones(SHARDS * 5000, np.float32)
    state, _ = sharded(line())(emaopt.init(x[0]), x, np.float32(0.5))
    assert state.count == len(x)


@pytest.mark.parametrize("compensated", [False, True])
def test_chunks_are_the_whole(compensated, values):
    run, half, decay = sharded(line()), STEPS // 2, np.float32(0.999)
    state, first = run(start(compensated=compensated), values[:half], decay)
    state, second = run(state, values[half:], decay)
    assert_right((state, np.concatenate([first, second])), values, decay)
    whole, _ = emaopt.scan(start(compensated=compensated), values, decay, method="scan")
    assert jax.tree.structure(state) == jax.tree.structure(whole)
    assert_near(state.m, whole.m, ema(np.abs(values), decay).m[-1])
    for part in ("weight", "decay_power", "count"):
        a, b = getattr(state, part), getattr(whole, part)
        np.testing.assert_allclose(a, b, rtol=8 * ULP)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_tree_in_one_gather(kind, values):
    mesh, decay = line(kind), {"a": np.float32(0.9), "b": np.float32(0.999)}
    x = {"a": values, "b": [values[:, 0], values]}
    state = emaopt.init(jax.tree.map(lambda leaf: leaf[0], x), decay=decay)
    run = sharded(mesh).lower(state, x, decay).compile()
    # Of each number its average and the residual, of each weight and decay power too.
    numbers, weights, count = 2 * D + 1, 2, 2
    size = 2 * numbers + 2 * 2 * weights + count
    assert collectives(run) == gathers(SHARDS * size)
    final, averages = run(state, x, decay)
    in_time = NamedSharding(mesh, P("time"))
    for leaf in jax.tree.leaves(averages):
        assert leaf.sharding.is_equivalent_to(in_time, leaf.ndim)
    for leaf in jax.tree.leaves(final):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == SHARDS
    for found, b in ((averages["a"], 0.9), (averages["b"][1], 0.999)):
        exact, size = ema(values, np.float32(b)), ema(np.abs(values), np.float32(b))
        assert_near(found, exact.corrected, size.corrected)
    assert_near(averages["b"][0], exact.corrected[:, 0], size.corrected[:, 0])


@pytest.mark.parametrize("reverse", [False, True])
def test_time_over_two_axes(reverse, values):
    mesh, decay = grid("a", "b"), np.float32(0.999)
    run = sharded(mesh, ("a", "b"), reverse=reverse).lower(start(), values, decay)
    run = run.compile()
    assert collectives(run) == gathers(SHARDS * (2 * D + 6))
    found = run(start(), values, decay)
    assert found[1].sharding.is_equivalent_to(NamedSharding(mesh, P(("a", "b"))), 2)
    assert_right(found, values, decay, reverse=reverse)


@pytest.mark.parametrize(
    ("kind", "method", "per_element"),
    [
        (AxisType.Auto, "scan", False),
        pytest.param(AxisType.Auto, "blocked", True, marks=slow),
        (AxisType.Explicit, "scan", True),
        pytest.param(AxisType.Explicit, "associative", True, marks=slow),
        (AxisType.Explicit, "blocked", False),
    ],
)
def test_features_over_another_axis(kind, method, per_element, values):
    """They stay where they are: one collective, of what is on the device."""
    explicit = kind == AxisType.Explicit
    if explicit and method == "associative" and jax.__version_info__ < (0, 9):
        pytest.skip("its lax.associative_scan mixes up the axes")
    mesh, decay = grid("model", "time", kind=kind), np.float32(0.999)
    x = np.repeat(values[:160], 4, 1)
    features, both = (
        NamedSharding(mesh, P(*a)) for a in (["model"], ["time", "model"])
    )
    zeros = jax.device_put(jnp.zeros(4 * D), features)
    state, x = emaopt.init(zeros, per_element=per_element), jax.device_put(x, both)
    run = sharded(mesh, method=method).lower(state, x, decay).compile()
    numbers = 6 * 2 * D + 2 if per_element else 2 * 2 * D + 6
    if explicit or method != "blocked":  # its blocks are flat
        assert collectives(run) == [("all-reduce", 4 * numbers)]
    state, averages = run(state, x, decay)
    assert averages.sharding.is_equivalent_to(both, 2)
    assert state.m.sharding.is_equivalent_to(features, 1)
    weight = features if per_element else NamedSharding(mesh, P())
    assert state.weight.sharding.is_equivalent_to(weight, state.weight.ndim)
    assert_right((state, averages), np.asarray(x), decay)


def test_inside_shard_map(values, rng):
    """Features are sharded too: their states are of another type, and a gather more."""
    mesh, decay = grid("model", "time"), np.float32(0.9)
    x, seen = np.repeat(values, 2, 1), rng.uniform(size=STEPS) < 0.5
    state = emaopt.init(jnp.zeros(2 * D))
    specs = jax.tree.map(lambda leaf: P("model") if leaf.ndim else P(), state)
    inside = jax.shard_map(
        lambda state, x, decay, seen: emaopt.scan(
            state, x, decay, observed=seen, unobserved="decay", axis_name="time"
        ),
        mesh=mesh,
        in_specs=(specs, P("time", "model"), P(), P("time")),
        out_specs=(specs, P("time", "model")),
    )
    run = jax.jit(inside).lower(state, x, decay, seen).compile()
    assert collectives(run) == gathers(4 * 6, 4 * 2 * D)
    found = run(state, x, decay, seen)
    assert_right(found, x, decay, seen, unobserved="decay")


@pytest.mark.parametrize(
    ("method", "masked"),
    [
        ("scan", True),
        *(pytest.param(m, False, marks=slow) for m in ("scan", "blocked")),
    ],
)
def test_derivatives_are_those_without_shards(method, masked, x64, rng):
    steps = SHARDS * (40 if method == "blocked" else 6)
    x, sides = rng.normal(size=(2, steps, D))
    state = emaopt.update(emaopt.init(x[0]), rng.normal(size=D), 0.6)
    masks = {}
    if masked:
        seen, reset = rng.uniform(size=(2, steps)) < [[0.5], [0.1]]
        x[~seen] = np.nan
        masks = {"observed": seen, "reset": reset, "unobserved": "decay"}

    def slopes(scan):
        def total(x, decay, m):
            final, averages = scan(
                state._replace(m=m), x, decay, method=method, reverse=masked, **masks
            )
            averages = jnp.where(jnp.isnan(averages), 0, averages)
            return jnp.sum(sides * averages) + jnp.sum(final.m) + final.decay_power

        return jax.jit(jax.grad(total, (0, 1, 2)))

    with_shards = slopes(functools.partial(emaopt.sharded_scan, line(), "time"))
    without = slopes(emaopt.scan)
    for decay in (0.0, 0.6, 0.999):
        decay = rng.uniform(0.2, 1, steps) if masked else np.float64(decay)
        found, expected = (f(x, decay, state.m) for f in (with_shards, without))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
        assert all(map(np.any, found[:2]))


@pytest.mark.parametrize(
    ("steps", "axis_name", "message"),
    [
        (
            12,
            "time",
            "12 steps, which the 8 shards over axis_name='time' do not divide",
        ),
        (8, "x", r"must name an axis of the mesh \('time'\), got 'x'"),
        (8, ("time", "x"), r"axis of the mesh \('time'\), got \('time', 'x'\)"),
        (8, None, r"must name an axis of the mesh \('time'\), got None"),
    ],
)
def test_meshes_that_do_not_fit(steps, axis_name, message):
    with pytest.raises(ValueError, match=message):
        emaopt.sharded_scan(line(), axis_name, start(), np.ones((steps, D)), 0.9)
