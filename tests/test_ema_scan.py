"""``ema_scan``: the reference form; the last raw and all corrected averages."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ema

import emaopt

SEED = json.loads((pathlib.Path(__file__).parent / "cases" / "seed.json").read_text())


def equations(jaxpr):
    """All equations of a jaxpr, those inside its equations included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("case", SEED["cases"], ids=lambda case: str(case["decay"]))
@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32])
def test_the_worked_examples(case, kind):
    out = jax.jit(emaopt.ema_scan)(jnp.float32(case["values"]), kind(case["decay"]))
    assert out.keys() == {"final_state", "corrected"}
    for name, value in out.items():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, case[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("static", [True, False])
def test_it_is_one_scan_whose_stacked_output_is_the_result(static):
    def run(values, decay=0.9):
        return emaopt.ema_scan(values, decay)["corrected"]

    args = (jnp.ones((7, 3)),) if static else (jnp.ones((7, 3)), jnp.float32(0.9))
    jaxpr = jax.make_jaxpr(run)(*args).jaxpr
    (loop,) = (e for e in equations(jaxpr) if e.primitive.name in ("scan", "while"))
    assert loop.primitive.name == "scan"
    assert loop.params["length"] == 7
    (stacked,) = (v for v in loop.outvars if v.aval.shape == (7, 3))
    # Nothing runs over what the scan has stacked.
    assert [e for e in equations(jaxpr) if stacked in e.invars] == []
    assert jaxpr.outvars[0].aval.shape == (7, 3)


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 2, 3), (1, 1), (4, 0)])
def test_any_rank(shape, rng):
    values = rng.normal(size=shape).astype(np.float32)
    out = emaopt.ema_scan(values, 0.7)
    expected = ema(values, 0.7)
    np.testing.assert_allclose(out["corrected"], expected.corrected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(out["final_state"], expected.m[-1], rtol=0, atol=1e-6)
    assert out["corrected"].shape == shape
    assert out["final_state"].shape == shape[1:]


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_no_steps(shape):
    out = jax.jit(emaopt.ema_scan)(jnp.zeros(shape), 0.9)
    assert out["corrected"].shape == shape
    np.testing.assert_array_equal(out["final_state"], np.zeros(shape[1:]))


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (np.int32, np.float32),
        (np.int8, np.float32),
        (np.uint8, np.float32),
        (np.bool_, np.float32),
        (jnp.int4, np.float32),
        (np.float32, np.float32),
        (np.float16, np.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
        (np.complex64, np.complex64),
    ],
)
@pytest.mark.parametrize("enable", [False, True], ids=["x32", "x64"])
def test_dtypes(dtype, result, enable, request):
    if enable:
        request.getfixturevalue("x64")
    values = jnp.array([1, 0, 1, 1], dtype)
    out = emaopt.ema_scan(values, np.float64(0.5))
    assert out["corrected"].dtype == result
    assert not out["corrected"].weak_type
    kept = np.complex64 if dtype == np.complex64 else np.float32
    assert out["final_state"].dtype == kept
    expected = np.array([1, 1 / 3, 5 / 7, 13 / 15])
    eps = max(float(jnp.finfo(result).eps), 2.0**-23)
    error = np.abs(np.asarray(out["corrected"], np.complex64) - expected)
    assert error.max() <= eps


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32])
def test_every_kind_of_decay_gives_float32_under_x64(kind, x64):
    for run in (emaopt.ema_scan, jax.jit(emaopt.ema_scan)):
        out = run(jnp.ones((3, 1), jnp.float32), kind(0.9))
        assert {x.dtype for x in out.values()} == {np.dtype(np.float32)}
        np.testing.assert_array_equal(out["corrected"], 1)


def test_wide_values_keep_their_width(x64):
    for dtype in (np.float64, np.complex128):
        out = emaopt.ema_scan(jnp.ones((3, 2), dtype), jnp.float32(0.9))
        assert {x.dtype for x in out.values()} == {np.dtype(dtype)}
        np.testing.assert_allclose(out["corrected"], 1, rtol=1e-15)
    ints = emaopt.ema_scan(jnp.arange(4, dtype=jnp.int64), 0.5)
    assert ints["corrected"].dtype == np.float32


def test_lists_and_python_numbers():
    out = emaopt.ema_scan([1.0, 2.0, 3.0], 0.5)
    np.testing.assert_allclose(out["corrected"], [1, 5 / 3, 17 / 7], rtol=1e-6)
    assert out["corrected"].dtype == np.float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (jnp.float32(1), r"values: found shape \(\), expected a leading time axis"),
        (1.0, r"values: found shape \(\), expected a leading time axis"),
        (
            np.array(["a", "b"]),
            r"values: found dtype <U1, expected an array of numbers",
        ),
        ("ab", r"values: found str 'ab', expected an array of numbers"),
        (None, r"values: found NoneType None, expected an array of numbers"),
        ("f4", r"values: found str 'f4', expected an array of numbers"),
        (["f4"], r"values: found str 'f4', expected an array of numbers"),
        ([None, 1.0], r"values: found NoneType None, expected an array of numbers"),
        ([[1.0], [1.0, 2.0]], r"values: expected an array of numbers, found none"),
        ({"a": np.ones(3)}, r"values: found dict .*, expected an array of numbers"),
        (jnp.float32, r"values: found .*, expected an array of numbers"),
        (jax.random.split(jax.random.key(0), 3), r"values: found dtype key<fry>"),
        (np.zeros(3, jax.dtypes.float0), r"values: found dtype .*expected an array of"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_values_that_are_no_sequence_of_numbers(values, message):
    with pytest.raises(AssertionError, match=message):
        emaopt.ema_scan(values, 0.9)


@pytest.mark.parametrize("shape", [(3,), (1,), (3, 1)])
def test_a_decay_that_is_no_scalar(shape):
    for kind in (np.full, jnp.full):
        decay = kind(shape, 0.9, np.float32)
        with pytest.raises(AssertionError, match="decay: expected a scalar"):
            emaopt.ema_scan(jnp.ones(3), decay)
        with pytest.raises(AssertionError, match="decay: expected a scalar"):
            jax.jit(emaopt.ema_scan)(jnp.ones(3), decay)


@pytest.mark.parametrize("decay", [[0.9, 0.9, 0.9], [0.9], {"a": 0.9}], ids=str)
def test_a_tree_of_decays(decay):
    with pytest.raises((AssertionError, ValueError), match=r"decay.*(scalar|finer)"):
        emaopt.ema_scan(jnp.ones(3), decay)


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        (1.0, ValueError, r"decay must be in \[0, 1\), got 1.0"),
        (-1e-9, ValueError, r"decay must be in \[0, 1\), got -1e-09"),
        (float("nan"), ValueError, r"decay must be in \[0, 1\), got nan"),
        (jnp.float32(1), ValueError, r"decay must be in \[0, 1\), got 1.0"),
        (jnp.bfloat16(0.9), TypeError, "decay is held in bfloat16, in which 0.999"),
        (None, TypeError, "decay must be a real number"),
        ("f4", TypeError, "decay must be a real number, .* got 'f4'"),
    ],
    ids=str,
)
def test_decays_out_of_range(decay, error, message):
    with pytest.raises(error, match=message):
        emaopt.ema_scan(jnp.ones(3), decay)


def test_vmap_over_values_and_decays_is_the_loop(rng):
    values = rng.normal(size=(2, 6, 3)).astype(np.float32)
    decays = np.float32([0.3, 0.95])
    out = jax.vmap(emaopt.ema_scan)(values, decays)
    for k in range(2):
        expected = ema(values[k], decays[k]).corrected
        np.testing.assert_allclose(out["corrected"][k], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.6, 0.999])
def test_gradients_are_those_of_the_recurrence(decay, x64, rng):
    values = rng.normal(size=(5, 2))
    cotangent = rng.normal(size=(5, 2))

    def loss(values, decay):
        out = emaopt.ema_scan(values, decay)
        return jnp.sum(out["corrected"] * cotangent) + jnp.sum(out["final_state"] ** 2)

    def reference(values, decay):
        out = ema(values, decay)
        return np.sum(out.corrected * cotangent) + np.sum(out.m[-1] ** 2)

    by_values, by_decay = jax.jit(jax.grad(loss, (0, 1)))(values, np.float64(decay))
    h = 1e-6
    for index in np.ndindex(values.shape):
        step = np.zeros_like(values)
        step[index] = h
        slope = reference(values + step, decay) - reference(values - step, decay)
        np.testing.assert_allclose(by_values[index], slope / (2 * h), atol=1e-8)
    # The reference is a polynomial over a polynomial: smooth on both sides of 0.
    h = 1e-6 if decay < 0.9 else 1e-8
    slope = (reference(values, decay + h) - reference(values, decay - h)) / (2 * h)
    np.testing.assert_allclose(by_decay, slope, rtol=1e-4, atol=1e-6)
    _, tangent = jax.jvp(
        lambda b: loss(values, b), (jnp.float64(decay),), (jnp.float64(1),)
    )
    np.testing.assert_allclose(tangent, by_decay, rtol=1e-9)
