"""Times with a half-life against the weighted definition, and against pandas."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import oracles
import pandas as pd
import pytest

import emaopt

TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}
STEPS, SECOND = 9, 10**9  # a half-life of a second, and times in nanoseconds
FUNCTIONS = ("mean", "var", "std", "cov", "corr")

# Eighths are exact in both dtypes.
NUMBERS = st.integers(-800, 800).map(lambda n: n / 8)
MISSING = st.sampled_from([np.nan, np.inf, -np.inf])
ARRAYS = hypothesis.extra.numpy.arrays(
    np.float64, (2, STEPS), elements=st.one_of(NUMBERS, NUMBERS, MISSING)
)
# Steps of up to ten half-lives, the sum of which leaves float32 room below a weight,
# and of thousands, which leave no weight at all in either dtype.
GAPS = st.lists(
    st.just(0)
    | st.floats(0, 10).map(lambda k: int(10**k))
    | st.integers(1, 10 * SECOND)
    | st.floats(12.4, 18).map(lambda k: int(10**k)),
    min_size=STEPS,
    max_size=STEPS,
)
FLAGS = {"adjust": st.booleans(), "ignore_na": st.booleans()}
X64 = pytest.mark.usefixtures("x64")
SHARED = [hypothesis.HealthCheck.function_scoped_fixture]


def kinds_of_times(gaps):
    """The same times in all that times may be, with half-lives."""
    passed = np.cumsum(np.array(gaps, np.int64))
    dates = np.datetime64("1700-01-01", "ns") + passed.astype("timedelta64[ns]")
    return {
        "dates": (dates, np.timedelta64(1, "s")),
        "integers": (passed, SECOND),
        "floats": (passed / SECOND - 3, 1.0),
    }


def run(name, x, y, **options):
    """One of the five functions, given what it takes."""
    if name in ("mean", "corr"):
        options.pop("bias", None)
    arrays = (x, y) if name in ("cov", "corr") else (x,)
    return np.asarray(getattr(emaopt, f"ewm_{name}")(*arrays, **options))


def by_definition(name, x, y, times, halflife, least, adjust, ignore_na, bias):
    """A moment, and the size to measure errors against."""
    seen = np.isfinite(x) & (np.isfinite(y) if name in ("cov", "corr") else True)
    halflives = np.diff(times, prepend=times[:1]) / halflife
    # What is gone since the last value, of which 1 − 0.5^halflives has no digits.
    gone, passed = np.ones(len(x)), np.inf
    for t in range(len(x)):
        passed += halflives[t] if seen[t] or not ignore_na else 0
        gone[t] = -np.expm1(-np.log(2) * passed)
        passed = 0 if seen[t] else passed
    flags = {"adjust": adjust, "ignore_na": ignore_na, "rest": gone}
    value, size, _ = oracles.ewm(name, x, y, 0.5**halflives, bias=bias, **flags)
    return np.where(np.cumsum(seen) < least, np.nan, value), size


def assert_close(found, expected, bound):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    there = ~np.isnan(expected)
    error = np.abs(found.astype(np.float64) - expected)
    assert (error <= bound)[there].all(), (found, expected, error / bound)


def check(dtype, names, arrays, gaps, kind, least, options):
    x, y = arrays
    times, halflife = kinds_of_times(gaps)[kind]
    for name in names:
        found = run(
            name,
            x.astype(dtype),
            y.astype(dtype),
            times=times,
            halflife=halflife,
            min_periods=least,
            **options,
        )
        assert found.dtype == dtype
        value, size = by_definition(name, x, y, times, halflife, least, **options)
        assert_close(found, value, TOLERANCE[dtype] * size)


KINDS = st.sampled_from(sorted(kinds_of_times([])))
GIVEN = hypothesis.given(
    ARRAYS,
    GAPS,
    KINDS,
    st.integers(0, 4),
    st.fixed_dictionaries({**FLAGS, "bias": st.booleans()}),
)


@hypothesis.settings(max_examples=200)
@GIVEN
def test_float32(arrays, gaps, kind, least, options):
    check(np.float32, FUNCTIONS, arrays, gaps, kind, least, options)


@hypothesis.settings(max_examples=200, suppress_health_check=SHARED)
@GIVEN
def test_float64(x64, arrays, gaps, kind, least, options):
    check(np.float64, FUNCTIONS, arrays, gaps, kind, least, options)
