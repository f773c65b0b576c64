"""The state: ``init``, ``update``, ``corrected`` and ``merge``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import ULP, ema

import emaopt

DTYPES = [
    (np.float32, np.float32),
    (jnp.bfloat16, np.float32),
    (np.float16, np.float32),
    (jnp.float8_e4m3fn, np.float32),
    (np.int32, np.float32),
    (np.uint8, np.float32),
    (np.bool_, np.float32),
    (np.complex64, np.complex64),
]


def types(tree):
    """Shape, dtype and weak type of every leaf, and the structure."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, x.dtype, x.weak_type) for x in leaves]


def run(state, values, decay, **options):
    """The states after each of ``values``, by the Python loop."""
    states = []
    for x in values:
        state = emaopt.update(state, x, decay, **options)
        states.append(state)
    return states


@pytest.mark.parametrize(("dtype", "accumulator"), DTYPES, ids=str)
def test_init_is_empty_and_at_least_float32(dtype, accumulator):
    tree = {"a": jnp.ones((2, 3), dtype), "b": [jnp.ones((), dtype)], "c": None}
    for init in (emaopt.init, jax.jit(emaopt.init)):
        state = init(tree)
        assert jax.tree.structure(state.m) == jax.tree.structure(tree)
        for m, x in zip(*map(jax.tree.leaves, (state.m, tree)), strict=True):
            assert (m.shape, m.dtype, m.weak_type) == (x.shape, accumulator, False)
            np.testing.assert_array_equal(m, 0)
        assert (state.weight, state.decay_power, state.count) == (0, 1, 0)
        assert state.weight.dtype == state.decay_power.dtype == np.float32
        assert state.count.dtype == np.int32
        assert state.residual.of_m is None
        assert state.residual.of_weight == state.residual.of_decay_power == 0


def test_init_under_x64(x64):
    tree = {"f": jnp.ones(2, jnp.float32), "d": jnp.ones(2), "n": jnp.arange(2)}
    state = emaopt.init(tree)
    dtypes = jax.tree.map(lambda x: str(x.dtype), state.m)
    assert dtypes == {"f": "float32", "d": "float64", "n": "float32"}
    assert state.weight.dtype == np.float64
    assert emaopt.init(tree["f"]).weight.dtype == np.float32
    wide = emaopt.init(
        {"f": jnp.ones(2, jnp.bfloat16), "z": jnp.ones(2, jnp.complex64)},
        accumulator_dtype=np.float64,
    )
    assert (wide.m["f"].dtype, wide.m["z"].dtype) == (np.float64, np.complex128)
    each = emaopt.init(tree, decay={"f": 0.5, "d": 0.5, "n": 0.5})
    dtypes = jax.tree.map(lambda x: str(x.dtype), each.weight)
    assert dtypes == {"f": "float32", "d": "float64", "n": "float32"}


def test_a_warm_start_copies_the_values():
    tree = {"w": jnp.arange(3.0), "n": jnp.int32(7), "h": np.float16(2.5)}
    state = emaopt.init(tree, warm_start=True)
    assert (state.weight, state.decay_power) == (1, 0)
    average = emaopt.corrected(state, tree)
    np.testing.assert_array_equal(average["w"], tree["w"])
    assert (average["n"], average["h"]) == (7, 2.5)
    state = emaopt.update(state, jax.tree.map(lambda x: x * 0, tree), 0.75)
    np.testing.assert_allclose(state.m["w"], 0.75 * np.arange(3), rtol=ULP)
    np.testing.assert_allclose(state.weight, 1, rtol=ULP)


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_no_buffer_is_shared(warm_start, jit):
    tree = {"w": jnp.ones(8), "v": jnp.ones(8)}
    init = functools.partial(emaopt.init, compensated=True, warm_start=warm_start)
    state = (jax.jit(init) if jit else init)(tree)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state, tree))]
    assert len(set(buffers)) == len(buffers)
    array = np.ones(8, np.float32)
    state = init(array)
    array[:] = 5
    np.testing.assert_array_equal(state.m, float(warm_start))


def test_the_structure_of_the_weights():
    tree = {"a": jnp.ones(2), "b": [jnp.ones(3), jnp.ones((2, 2))]}
    state = emaopt.init(tree, decay={"a": 0.5, "b": lambda count: 0.9})
    assert jax.tree.structure(state.weight) == jax.tree.structure({"a": 0, "b": 0})
    state = emaopt.init(tree, per_element=True)
    assert types(state.weight) == types(tree)
    np.testing.assert_array_equal(state.decay_power["b"][1], np.ones((2, 2)))
    for decay in (0.9, jnp.float32(0.9), lambda count: 0.9, None):
        assert emaopt.init(tree, decay=decay).weight.shape == ()


@pytest.mark.parametrize("tree", [{}, None, (), {"a": {}}], ids=str)
def test_empty_trees(tree):
    state = emaopt.update(emaopt.init(tree), tree, 0.5)
    assert (state.m, state.count, state.weight) == (tree, 1, 0.5)
    assert emaopt.corrected(state) == tree
    assert emaopt.merge(state, state).count == 2


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_small_leaves(shape):
    for options in ({}, {"per_element": True}, {"compensated": True}):
        state = emaopt.init(jnp.zeros(shape), **options)
        state = run(state, [jnp.ones(shape), jnp.full(shape, 3.0)], 0.5)[-1]
        average = emaopt.corrected(state, jnp.zeros(shape, jnp.bfloat16))
        assert (average.shape, average.dtype) == (shape, jnp.bfloat16)
        np.testing.assert_allclose(emaopt.corrected(state), np.full(shape, 7 / 3))


def test_masked_leaves_are_passed_over():
    tree = {"a": jnp.ones(2), "b": optax.MaskedNode(), "c": None}
    state = emaopt.init(tree, compensated=True)
    given = {"a": jnp.full(2, 3.0), "b": jax.random.key(0), "c": None}
    state = emaopt.update(state, given, 0.5)
    assert state.m["b"] == optax.MaskedNode()
    out = emaopt.corrected(state, given)
    assert out["b"] is given["b"]
    np.testing.assert_array_equal(out["a"], 3)
    assert emaopt.corrected(state)["b"] == optax.MaskedNode()


SCALARS = {
    "float": lambda b: b,
    "np64": np.float64,
    "np32": np.float32,
    "np0d": lambda b: np.array(b),
    "jnp": jnp.float32,
    "weak": lambda b: jnp.asarray(b),
    "schedule": lambda b: lambda count: b,
    "schedule32": lambda b: lambda count: jnp.float32(b),
}


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.parametrize("enable", [False, True], ids=["x32", "x64"])
def test_every_kind_of_decay(kind, enable, request):
    if enable:
        request.getfixturevalue("x64")
    decay = SCALARS[kind](0.875)
    xs = [jnp.float32([1, -2]), jnp.float32([3, 5])]
    expected = ema(np.array(xs), 0.875)
    state = emaopt.init(xs[0])
    before = types(state)
    updates = [
        lambda s, x: emaopt.update(s, x, decay),
        jax.jit(lambda s, x: emaopt.update(s, x, decay)),
    ]
    if not kind.startswith("schedule"):
        jitted = jax.jit(emaopt.update)
        updates.append(lambda s, x: jitted(s, x, decay))
    for update in updates:
        last = functools.reduce(update, xs, state)
        assert types(last) == before
        np.testing.assert_allclose(last.m, expected.m[-1], rtol=4 * ULP)
        np.testing.assert_allclose(last.weight, 1 - 0.875**2, rtol=2 * ULP)
        np.testing.assert_allclose(last.decay_power, 0.875**2, rtol=2 * ULP)
        average = emaopt.corrected(last)
        np.testing.assert_allclose(average, expected.corrected[-1], rtol=4 * ULP)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, np.complex64])
def test_one_trace_for_any_number_of_steps(dtype):
    for kind in (float, np.float64, np.float32, jnp.float32, jnp.asarray):
        traces = []

        @jax.jit
        def step(state, x, decay, traces=traces):
            traces.append(None)
            return emaopt.update(state, x, decay)

        tree = {"a": jnp.ones(2, dtype), "loss": 1.0}
        state = emaopt.init(tree, compensated=True)
        for k in range(4):
            x = {"a": jnp.ones(2, dtype), "loss": float(k)}
            state = step(state, x, kind(0.9))
        assert len(traces) == 1


def test_a_prefix_of_decays_and_one_for_all():
    tree = {"a": jnp.zeros(2), "b": [jnp.zeros(2), jnp.zeros(())]}
    decays = {"a": 0.0, "b": lambda count: 0.5}
    state = emaopt.init(tree, decay=decays)
    values = jax.tree.map(lambda x: x + 1, tree), jax.tree.map(lambda x: x + 3, tree)
    out = run(state, values, decays)[-1]
    np.testing.assert_array_equal(out.m["a"], 3)
    np.testing.assert_array_equal(out.m["b"][0], 1.75)
    assert (out.weight["a"], out.weight["b"]) == (1, 0.75)
    np.testing.assert_allclose(emaopt.corrected(out)["b"][1], 7 / 3, rtol=ULP)
    # One decay for all of them still goes into the weights of each.
    out = run(state, values, 0.5)[-1]
    assert (out.weight["a"], out.weight["b"]) == (0.75, 0.75)


def test_decays_within_a_leaf():
    state = emaopt.init(jnp.zeros((2, 3)), per_element=True)
    decays = np.float32([[0, 0.5, 0.9]])
    xs = np.float32([np.ones((2, 3)), np.full((2, 3), 3)])
    out = run(state, xs, np.broadcast_to(decays, (2, 3)))[-1]
    for k, b in enumerate(decays[0]):
        expected = ema(xs[:, :, k], b)
        np.testing.assert_allclose(out.m[:, k], expected.m[-1], rtol=2 * ULP)
        np.testing.assert_allclose(out.weight[:, k], expected.weight[-1], rtol=2 * ULP)
    with jax.numpy_rank_promotion("raise"):
        assert types(run(state, xs[:1], decays)[0]) == types(state)


@pytest.mark.parametrize("unobserved", ["hold", "decay"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.6, 0.99])
def test_steps_that_are_not_observed(unobserved, traced, decay, rng):
    values = rng.normal(size=(9, 3)).astype(np.float32)
    seen = rng.uniform(size=9) < 0.6
    seen[0] = False
    values[~seen] = np.nan
    expected = ema(values, decay, seen, unobserved)
    update = functools.partial(emaopt.update, unobserved=unobserved)
    if traced:
        update = jax.jit(update)
    state = emaopt.init(values[0])
    for t in range(9):
        state = update(state, values[t], decay, observed=jnp.asarray(seen[t]))
        np.testing.assert_allclose(state.m, expected.m[t], atol=1e-6)
        average = emaopt.corrected(state)
        if decay or unobserved == "hold":  # at 0 what has decayed is gone
            np.testing.assert_allclose(average, expected.corrected[t], atol=1e-6)
            np.testing.assert_allclose(state.weight, expected.weight[t][0], rtol=1e-6)
    assert state.count == (seen.sum() if unobserved == "hold" else 9)


@pytest.mark.parametrize("unobserved", ["hold", "decay"])
def test_elements_that_are_not_observed(unobserved, rng):
    values = rng.normal(size=(8, 2, 3)).astype(np.float32)
    seen = rng.uniform(size=values.shape) < 0.6
    values[~seen] = np.nan
    expected = ema(values, 0.7, seen, unobserved)
    state = emaopt.init(values[0], per_element=True, compensated=True)
    for t in range(8):
        state = emaopt.update(
            state, values[t], 0.7, observed=seen[t], unobserved=unobserved
        )
    assert np.isfinite(state.m).all()
    np.testing.assert_allclose(state.weight, expected.weight[-1], rtol=1e-6)
    np.testing.assert_allclose(state.decay_power, expected.decay_power[-1], rtol=1e-6)
    average = emaopt.corrected(state)
    np.testing.assert_allclose(average, expected.corrected[-1], atol=1e-6)


def test_bfloat16_goes_into_float32_and_back():
    state = emaopt.init(jnp.zeros(2, jnp.float32))
    state = emaopt.update(state, jnp.full(2, 1.5, jnp.bfloat16), 0.9)
    np.testing.assert_allclose(emaopt.corrected(state), 1.5, rtol=ULP)
    out = emaopt.corrected(state, jnp.zeros(2, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    state = emaopt.init(jnp.zeros(2, jnp.bfloat16))
    emaopt.update(state, jnp.ones(2, jnp.float32), 0.9)  # gradients wider than params


def test_corrected_before_the_first_value():
    state = emaopt.init({"a": jnp.zeros(2), "n": jnp.zeros(2, jnp.int32)})
    for read in (emaopt.corrected, jax.jit(emaopt.corrected)):
        out = read(state)
        assert np.isnan(out["a"]).all()
        assert np.isnan(out["n"]).all()
        like = {"a": jnp.full(2, 5, jnp.bfloat16), "n": jnp.full(2, 6)}
        out = read(state, like)
        np.testing.assert_array_equal(out["a"], jnp.full(2, 5, jnp.bfloat16))
        assert (out["a"].dtype, out["n"].dtype) == (jnp.bfloat16, np.float32)
        np.testing.assert_array_equal(out["n"], 6)

    def loss(w):
        return jnp.sum(emaopt.corrected(emaopt.init(w), w) ** 2)

    np.testing.assert_array_equal(jax.grad(loss)(jnp.full(2, 3.0)), 6)
    each = emaopt.init(jnp.zeros(2), per_element=True)
    each = emaopt.update(each, jnp.ones(2), 0.5, observed=np.array([True, False]))
    np.testing.assert_array_equal(emaopt.corrected(each, jnp.full(2, 9.0)), [1, 9])


def test_complex_values():
    xs = np.complex64([[1 + 2j], [3 - 1j]])
    for decay in (0.5, np.float32(0.5)):
        for options in ({}, {"compensated": True}, {"per_element": True}):
            out = run(emaopt.init(xs[0], **options), xs, decay)[-1]
            average = emaopt.corrected(out, jnp.zeros(1, jnp.complex64))
            np.testing.assert_allclose(average, [7 / 3], rtol=0, atol=2 * ULP)
            assert average.dtype == np.complex64


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("abstract", [False, True])
def test_shardings_are_kept(warm_start, kind, abstract):
    if warm_start and abstract:
        return
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, P("d"))
    tree = {"w": jax.device_put(jnp.ones((8, 3)), rows)}
    given = tree
    if abstract:
        given = {"w": jax.ShapeDtypeStruct((8, 3), np.float32, sharding=rows)}
    init = functools.partial(emaopt.init, compensated=True, warm_start=warm_start)
    update = jax.jit(lambda s, x: emaopt.update(s, x, 0.9))
    for make in (init,) if abstract else (init, jax.jit(init)):
        state = make(given)
        for after in (state, update(state, tree), emaopt.update(state, tree, 0.9)):
            for leaf in (
                after.m["w"],
                after.residual.of_m["w"],
                emaopt.corrected(after)["w"],
            ):
                assert leaf.sharding.is_equivalent_to(rows, 2)
                assert len(leaf.sharding.device_set) == 4
        assert jax.typeof(state.m["w"]) == jax.typeof(update(state, tree).m["w"])
    if kind == AxisType.Auto:
        text = update.lower(state, tree).compile().as_text()
        assert not any(op in text for op in ("all-gather", "all-reduce", "permute"))
