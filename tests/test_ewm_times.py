"""Times with a half-life against the weighted definition, and against pandas."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import oracles
import pandas as pd
import pytest

import emaopt

FUNCTIONS = ("mean", "var", "std", "cov", "corr")
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}
STEPS, HALFLIFE = 9, 10**9

# Eighths are exact in both dtypes.
NUMBERS = st.integers(-800, 800).map(lambda n: n / 8)
MISSING = st.sampled_from([np.nan, np.inf, -np.inf])
ARRAYS = hypothesis.extra.numpy.arrays(
    np.float64, (2, STEPS), elements=st.one_of(NUMBERS, NUMBERS, MISSING)
)
# Times in three forms, with a half-life; the unit of integers is 1e-9 half-lives.
# The dates are early ones: pandas rounds them to float64, before it subtracts them.
FORMS = {
    "dates": lambda ns: (
        np.datetime64("1970-01-01", "ns") + ns.astype("timedelta64[ns]"),
        np.timedelta64(1, "s"),
    ),
    "integers": lambda ns: (ns, HALFLIFE),
    "floats": lambda ns: (ns / 1e6 - 1e4, 1e3),
}
FLAGS = {"adjust": st.booleans(), "ignore_na": st.booleans()}
OPTIONS = st.fixed_dictionaries({**FLAGS, "bias": st.booleans()})


# Steps of no length, of a billionth of a half-life to ten, whose sum leaves float32
# room below a weight, and of a thousand and up, which leave no weight at all.
GAPS = st.one_of(
    st.just(0),
    st.floats(0, 10).map(lambda k: int(10**k)),
    st.integers(1, 10 * HALFLIFE),
    st.floats(12.1, 18).map(lambda k: int(10**k)),
)
TIMES = st.lists(GAPS, min_size=STEPS, max_size=STEPS).map(
    lambda gaps: np.cumsum(np.array(gaps, np.int64))
)


def run(name, x, y, *, bias, **options):
    """One of the five functions, given what it takes."""
    if name in ("var", "std", "cov"):
        options["bias"] = bias
    arrays = (x, y) if name in ("cov", "corr") else (x,)
    return np.asarray(getattr(emaopt, f"ewm_{name}")(*arrays, **options))


def by_definition(name, x, y, times, halflife, *, adjust, ignore_na, bias):
    """A moment, the size to measure errors against, and what has been seen."""
    seen = np.isfinite(x) & (np.isfinite(y) if name in ("cov", "corr") else True)
    halflives = np.diff(times, prepend=times[:1]) / halflife
    # What is gone since the last value; 1 − 0.5^halflives would have lost its digits.
    gone, passed = np.ones(len(x)), np.inf
    for t in range(len(x)):
        passed += halflives[t] if seen[t] or not ignore_na else 0
        gone[t] = -np.expm1(-np.log(2) * passed)
        passed = 0 if seen[t] else passed
    flags = {"adjust": adjust, "ignore_na": ignore_na, "rest": gone}
    value, size, _ = oracles.ewm(name, x, y, 0.5**halflives, bias, **flags)
    return value, size, np.cumsum(seen)


def assert_close(found, expected, bound):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    there = ~np.isnan(expected)
    error = np.abs(found.astype(np.float64) - expected)
    assert (error <= bound)[there].all(), (found, expected, bound)


def check(dtype, arrays, times, halflife, options, least=0):
    x, y = arrays
    given = x.astype(dtype), y.astype(dtype)
    how = {"times": times, "halflife": halflife, "min_periods": least}
    for name in FUNCTIONS:
        found = run(name, *given, **how, **options)
        value, size, count = by_definition(name, x, y, times, halflife, **options)
        assert found.dtype == dtype
        value = np.where(count < least, np.nan, value)
        assert_close(found, value, TOLERANCE[dtype] * size)


GIVEN = hypothesis.given(
    ARRAYS, TIMES, st.sampled_from(sorted(FORMS)), OPTIONS, st.integers(0, 4)
)


@pytest.mark.slow
@hypothesis.settings(max_examples=150)
@GIVEN
def test_the_definition_in_float32(arrays, times, form, options, least):
    check(np.float32, arrays, *FORMS[form](times), options, least)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@GIVEN
def test_the_definition_in_float64(x64, arrays, times, form, options, least):
    check(np.float64, arrays, *FORMS[form](times), options, least)


@hypothesis.settings(
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    ARRAYS,
    st.lists(st.integers(0, 50), min_size=STEPS, max_size=STEPS),
    st.fixed_dictionaries(FLAGS),
    st.integers(0, 4),
)
def test_means_of_dates_as_in_pandas(x64, arrays, gaps, flags, least):
    """In tenths of a half-life, of whose decay 1 − β has the digits."""
    times, halflife = FORMS["dates"](np.cumsum(gaps) * (HALFLIFE // 10))
    window = {"times": times, "halflife": halflife, "min_periods": least, **flags}
    for x in arrays:
        found = np.asarray(emaopt.ewm_mean(x, **window))
        reference = pd.Series(x).ewm(**window).mean().to_numpy()
        _, size, _ = by_definition("mean", x, x, times, halflife, bias=True, **flags)
        assert_close(found, reference, TOLERANCE[np.float64] * size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("halflives", [2000, 10**9])
def test_nothing_is_left_past_a_long_gap(rng, form, halflives):
    arrays = rng.integers(-800, 800, (2, STEPS)) / 8
    arrays[:, [2, 6]] = np.nan
    gaps = np.full(STEPS, HALFLIFE // 2)
    gaps[5] = halflives * HALFLIFE
    for adjust in (True, False):
        options = {"adjust": adjust, "ignore_na": False, "bias": True}
        times = FORMS[form](np.cumsum(gaps))
        check(np.float32, arrays, *times, options)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("adjust", [True, False])
def test_short_sequences(steps, adjust):
    arrays = np.array([[3.0, 1.0], [-1.0, 2.5]])[:, :steps]
    options = {"adjust": adjust, "ignore_na": False, "bias": adjust}
    times = np.array([7, 7 + HALFLIFE // 3])[:steps]
    for form in FORMS.values():
        check(np.float32, arrays, *form(times), options)
