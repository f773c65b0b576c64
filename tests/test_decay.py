"""Decays: pandas' parameters, ranges and dtypes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import emaopt

CONVERTERS = {
    "alpha": emaopt.decay_from_alpha,
    "com": emaopt.decay_from_com,
    "span": emaopt.decay_from_span,
    "halflife": emaopt.decay_from_halflife,
}
GOOD = [
    ("alpha", 1e-9),
    ("alpha", 0.3),
    ("alpha", 1),
    ("com", 0),
    ("com", 9),
    ("com", 1e6),
    ("span", 1),
    ("span", 19.5),
    ("span", 1e6),
    ("halflife", 0.1),
    ("halflife", 1),
    ("halflife", 1e6),
]
BAD = [
    ("alpha", 0),
    ("alpha", -0.1),
    ("alpha", 1.5),
    ("com", -0.1),
    ("span", 0.9),
    ("span", -1),
    ("halflife", 0),
    ("halflife", -2),
]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=str)
def test_converters_give_pandas_weights(name, value):
    decay = CONVERTERS[name](value)
    assert type(decay) is float
    assert 0 <= decay < 1
    # Of an impulse, without adjustment, pandas gives 1, β, β², ... and that is its β.
    impulse = pd.Series([1.0, 0.0]).ewm(adjust=False, **{name: value}).mean()
    np.testing.assert_allclose(decay, impulse[1], rtol=1e-14)


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_converters_refuse_what_pandas_refuses(name, value):
    with pytest.raises(ValueError, match=name):
        pd.Series([1.0]).ewm(**{name: value})
    with pytest.raises(
        ValueError, match=rf"{name} must be in .*, got " + re.escape(str(value))
    ):
        CONVERTERS[name](value)


@pytest.mark.parametrize("name", CONVERTERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_converters_refuse_what_is_not_finite(name, value):
    with pytest.raises(
        ValueError, match=rf"{name} must be in .*, got " + re.escape(str(value))
    ):
        CONVERTERS[name](value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", 1e-17), ("com", 1e17), ("span", 1e17), ("halflife", 1e17)],
)
def test_converters_refuse_what_rounds_to_a_decay_of_1(name, value):
    with pytest.raises(
        ValueError, match=rf"{name} must be in .*, got " + re.escape(str(value))
    ):
        CONVERTERS[name](value)


@pytest.mark.parametrize("name", CONVERTERS)
@pytest.mark.parametrize("value", ["0.5", None, True, 1j, [0.5], np.full(2, 0.5)])
def test_converters_refuse_what_is_no_real_number(name, value):
    with pytest.raises(TypeError, match=rf"{name} must be a real number in .*, got"):
        CONVERTERS[name](value)


@pytest.mark.parametrize("kind", [np.float32, np.float64, jnp.float32, np.int64])
def test_converters_take_any_scalar(kind):
    for name, function in CONVERTERS.items():
        value = 1 if name in ("alpha", "span") else 2
        decay = function(kind(value))
        assert type(decay) is float
        assert decay == function(float(value))


@pytest.mark.parametrize("halflife", [0.01, 0.3, 1.0, 7.0, 693.0, 1e6, 1e10])
def test_halflife_round_trip(halflife):
    decay = emaopt.decay_from_halflife(halflife)
    # The decay is rounded to 2⁻⁵³, which is that much of 1 − decay.
    tolerance = 4e-16 * max(halflife, 1)
    found = emaopt.halflife_from_decay(decay)
    np.testing.assert_allclose(found, halflife, rtol=tolerance)
    np.testing.assert_allclose(decay ** float(halflife), 0.5, rtol=tolerance)


def test_halflife_of_no_decay():
    assert emaopt.halflife_from_decay(0) == 0
    assert emaopt.halflife_from_decay(0.5) == 1
    assert type(emaopt.halflife_from_decay(np.float32(0.5))) is float
    for decay in (1.0, 1.5, -0.1, np.nan):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\)"):
            emaopt.halflife_from_decay(decay)


RANGE = [1.0, 1.5, -0.1, np.nan, np.inf, -np.inf, np.nextafter(0, -1), 1, -1, 2]


@pytest.mark.parametrize("value", RANGE, ids=str)
@pytest.mark.parametrize("kind", [lambda x: x, np.float32, np.float64, jnp.float32])
def test_known_decays_out_of_range_raise(value, kind):
    decay = kind(value)
    if decay == 0:  # float32 has no number so close to 0
        return
    state = emaopt.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got"):
        emaopt.update(state, jnp.ones(2), decay)
    with pytest.raises(ValueError, match=r"decay\['a'\] must be in \[0, 1\), got"):
        emaopt.update(
            emaopt.init({"a": jnp.ones(2)}, decay={"a": 0.5}),
            {"a": jnp.ones(2)},
            {"a": decay},
        )
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got"):
        emaopt.ema_scan(jnp.ones(2), decay)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1 - 2.0**-24, np.nextafter(1, 0)])
def test_known_decays_in_range_are_taken(value):
    state = emaopt.update(emaopt.init(jnp.ones(2)), jnp.ones(2), value)
    np.testing.assert_allclose(emaopt.corrected(state), 1, rtol=2.0**-23)


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (jnp.bfloat16(0.9), "decay is held in bfloat16, in which 0.999 rounds to 1;"),
        (np.float16(0.9), "decay is held in float16, in which 0.999 rounds to 0.9990"),
        (jnp.float8_e4m3fn(0.5), "decay is held in float8_e4m3fn, in which 0.999"),
        (True, "decay must be a real number, an optax.Schedule or a pytree of them"),
        (np.bool_(False), "decay must be a real number"),
        (0.5j, "decay must be real, got dtype complex"),
        (np.complex64(0.5), "decay must be real, got dtype complex64"),
        ("0.9", "decay must be a real number, .* got '0.9'"),
        ("f4", "decay must be a real number, .* got 'f4'"),
        (None, "decay must be a real number, .* got None"),
        (jax.random.key(0), "decay must be a real number"),
        (object(), "decay must be a real number, .* got <object"),
    ],
    ids=lambda case: str(case)[:12],
)
def test_dtypes_that_hold_no_decay(decay, message):
    state = emaopt.init(jnp.ones(2))
    with pytest.raises(TypeError, match=message):
        emaopt.update(state, jnp.ones(2), decay)
    with pytest.raises(TypeError, match=message):
        emaopt.ema(decay)
    with pytest.raises(TypeError, match=message):
        emaopt.update(state, jnp.ones(2), lambda count: decay)


def test_a_traced_decay_in_low_precision_raises_while_tracing():
    def step(decay):
        return emaopt.update(emaopt.init(jnp.ones(2)), jnp.ones(2), decay)

    with pytest.raises(TypeError, match="decay is held in bfloat16"):
        jax.jit(step)(jnp.bfloat16(0.5))


def test_schedules_may_return_1_and_no_more():
    state = emaopt.init(jnp.ones(2))
    state = emaopt.update(state, jnp.full(2, 4.0), lambda count: 1.0)
    assert np.isnan(emaopt.corrected(state)).all()
    assert int(state.count) == 1
    state = emaopt.update(state, jnp.full(2, 4.0), lambda count: jnp.float32(0.5))
    np.testing.assert_array_equal(emaopt.corrected(state), 4)
    assert int(state.count) == 2
    for bad in (1.01, np.nan, -0.1):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got"):
            emaopt.update(state, jnp.ones(2), lambda count, bad=bad: bad)
