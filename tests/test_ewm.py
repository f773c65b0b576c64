"""The window of dataframes against pandas, Polars and the weighted definition."""

import datetime

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pandas as pd
import polars as pl
import pytest

import emaopt

FUNCTIONS = ("mean", "var", "std", "cov", "corr")
BIASED = ("var", "std", "cov")
PAIRED = ("cov", "corr")
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}
STEPS, COLUMNS = 13, 3

# Eighths: exact in both dtypes, and no spread so small that pandas, which rounds to
# 2⁻⁵³ of the values, would lose it.
NUMBERS = st.integers(-800, 800).map(lambda n: n / 8)
MISSING = st.sampled_from([np.nan, np.inf, -np.inf])
ARRAYS = hypothesis.extra.numpy.arrays(
    np.float64, (STEPS, COLUMNS), elements=st.one_of(NUMBERS, NUMBERS, MISSING)
)
PARAMETERS = st.one_of(
    st.tuples(st.just("alpha"), st.floats(1e-3, 0.9) | st.just(1.0)),
    st.tuples(st.just("com"), st.floats(0.1, 1e3) | st.just(0.0)),
    st.tuples(st.just("span"), st.floats(1.25, 2e3) | st.just(1.0)),
    st.tuples(st.just("halflife"), st.floats(0.3, 1e3)),
)
OPTIONS = st.fixed_dictionaries(
    {"adjust": st.booleans(), "ignore_na": st.booleans(), "bias": st.booleans()}
)
_traced_mean = jax.jit(emaopt.ewm_mean, static_argnames=("axis", "adjust", "ignore_na"))


def run(name, x, y, *args, bias=False, **options):
    """One of the five functions, given what it takes."""
    if name in BIASED:
        options["bias"] = bias
    arrays = (x, y) if name in PAIRED else (x,)
    return np.asarray(getattr(emaopt, f"ewm_{name}")(*arrays, *args, **options))


def pandas_run(name, x, y, *, bias, **options):
    """The same from pandas, column by column."""
    columns = []
    for a, b in zip(x.T, y.T, strict=True):
        other = (pd.Series(b),) if name in PAIRED else ()
        how = {"bias": bias} if name in BIASED else {}
        with np.errstate(invalid="ignore"):
            columns.append(getattr(pd.Series(a).ewm(**options), name)(*other, **how))
    return np.stack(columns, axis=1)


def assert_close(found, expected, bound):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    error = np.abs(found.astype(np.float64) - expected)
    there = ~np.isnan(expected)
    assert (error <= bound)[there].all(), (found, expected, error / bound)


def check_against_pandas(dtype, x, y, parameter, options, least):
    kind, value = parameter
    decay = getattr(emaopt, f"decay_from_{kind}")(value)
    flags = {name: options[name] for name in ("adjust", "ignore_na")}
    for name in FUNCTIONS:
        given = {kind: value}
        if name == "mean":
            # Traced, the decay is not compiled into the program; float32 rounds it.
            traced = np.asarray(decay, dtype)
            decay = float(traced)
            given = {"alpha": 1 - decay} if dtype is np.float32 else given
            found = np.asarray(
                _traced_mean(x.astype(dtype), traced, min_periods=least, **flags)
            )
            if decay == 0.5 and not any(flags.values()):
                continue  # see test_alpha_one_half_in_pandas
        else:
            decay = getattr(emaopt, f"decay_from_{kind}")(value)
            arrays = x.astype(dtype), y.astype(dtype)
            found = run(name, *arrays, decay, min_periods=least, **options)
        assert found.dtype == dtype
        reference = pandas_run(name, x, y, min_periods=least, **given, **options)
        ours = {"rest": 1 - decay, **flags}
        _, size, left = oracles.ewm(
            name, x, y, np.full(STEPS, decay), bias=options["bias"], **ours
        )
        # The denominator of pandas cancels: it is right to 2⁻⁵³, not relatively.
        lost = 2.0**-50 / np.where(left > 0, left, 1)
        vague = lost > 1e-3
        found, reference = (np.where(vague, 0, a) for a in (found, reference))
        assert_close(found, reference, (TOLERANCE[dtype] + lost) * size)


@hypothesis.settings(max_examples=50)
@hypothesis.given(ARRAYS, ARRAYS, PARAMETERS, OPTIONS, st.integers(0, 5))
def test_equals_pandas_in_float32(x, y, parameter, options, least):
    check_against_pandas(np.float32, x, y, parameter, options, least)


@hypothesis.settings(
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(ARRAYS, ARRAYS, PARAMETERS, OPTIONS, st.integers(0, 5))
def test_equals_pandas_in_float64(x64, x, y, parameter, options, least):
    check_against_pandas(np.float64, x, y, parameter, options, least)
