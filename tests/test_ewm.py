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
FLAGS = {"adjust": st.booleans(), "ignore_na": st.booleans()}
OPTIONS = st.fixed_dictionaries({**FLAGS, "bias": st.booleans()})
UNBIASED = st.fixed_dictionaries({**FLAGS, "bias": st.just(False)})
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


# Compiling a program for each set of options is most of the time of these two.
@pytest.mark.slow
@hypothesis.settings(max_examples=40)
@hypothesis.given(ARRAYS, ARRAYS, PARAMETERS, UNBIASED, st.integers(0, 5))
def test_equals_pandas_in_float32(x, y, parameter, options, least):
    check_against_pandas(np.float32, x, y, parameter, options, least)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(ARRAYS, ARRAYS, PARAMETERS, OPTIONS, st.integers(0, 5))
def test_equals_pandas_in_float64(x64, x, y, parameter, options, least):
    check_against_pandas(np.float64, x, y, parameter, options, least)


def samples(rng, steps=STEPS, missing=0.2):
    """Two arrays of columns with gaps, at their beginnings too."""
    x, y = rng.normal(size=(2, steps, COLUMNS))
    x[rng.random(x.shape) < missing] = np.nan
    y[rng.random(y.shape) < missing] = -np.inf
    x[:2, 0] = np.nan
    x[2] = 1
    return x, y


ADJUST = pytest.mark.parametrize("adjust", [True, False])
IGNORE_NA = pytest.mark.parametrize("ignore_na", [True, False])


@ADJUST
@IGNORE_NA
@pytest.mark.parametrize(
    ("dtype", "names"),
    [(np.float32, ("mean",)), (np.float64, ("std", "corr"))],
)
def test_times_by_the_definition(rng, x64, adjust, ignore_na, dtype, names):
    x, y = (a.astype(dtype) for a in samples(rng))
    # Steps of no length, of a millionth of a half-life and of twenty.
    gaps = np.array([0, 1, 0, 0.3, 1e-6, 2, 0, 20, 0.7, 0.01, 3, 5, 0.2])
    flags = {"adjust": adjust, "ignore_na": ignore_na}
    for name in names:
        found = run(name, x, y, times=5 + np.cumsum(gaps), halflife=2.0, **flags)
        value, size, _ = oracles.ewm(name, x, y, 0.5 ** (gaps / 2), **flags)
        assert_close(found, value, TOLERANCE[dtype] * size)


@ADJUST
@IGNORE_NA
def test_dates_as_in_pandas(rng, adjust, ignore_na):
    x, y = (a.astype(np.float32) for a in samples(rng))
    days = np.cumsum(rng.integers(0, 4, STEPS)).astype("timedelta64[D]")
    times = (np.datetime64("1999-12-24") + days).astype("datetime64[ns]")
    flags = {"adjust": adjust, "ignore_na": ignore_na}
    size = run("mean", np.abs(x), y, 0.99, **flags)
    reference = pandas_run(
        "mean", x, y, bias=False, times=times, halflife="36h", **flags
    )
    for halflife in (np.timedelta64(36, "h"), datetime.timedelta(hours=36)):
        found = run("mean", x, y, times=times, halflife=halflife, **flags)
        assert_close(found, reference, 1e-6 * np.nanmax(size))


@ADJUST
@IGNORE_NA
@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_equals_polars(rng, name, adjust, ignore_na):
    x = samples(rng)[0]
    null = [[None if np.isnan(v) else v for v in column] for column in x.T]
    bias = {} if name == "mean" else {"bias": True}
    method = f"ewm_{name}"
    polars = [
        getattr(pl.Series(column, dtype=pl.Float64), method)(
            alpha=0.3, adjust=adjust, ignore_nulls=ignore_na, min_samples=2, **bias
        ).to_numpy()
        for column in null
    ]
    x = x.astype(np.float32)
    options = {"min_periods": 2, "adjust": adjust, "ignore_na": ignore_na, **bias}
    found = run(name, x, x, 0.7, **options)
    found = np.where(np.isnan(x), np.nan, found)
    # Polars saw the values before they were rounded to float32.
    assert_close(found, np.stack(polars, axis=1), 4e-6 * np.nanmax(np.abs(x)))


def test_equals_polars_at_times(rng):
    x = rng.normal(size=STEPS).astype(np.float32)
    times = np.cumsum(rng.integers(1, 9, STEPS))
    by = pl.DataFrame({"x": x.astype(np.float64), "t": times})
    polars = by.select(pl.col("x").ewm_mean_by("t", half_life="5i"))["x"].to_numpy()
    found = emaopt.ewm_mean(x, times=times, halflife=5, adjust=False)
    assert_close(np.asarray(found), polars, 1e-6 * np.abs(x).max())


def test_alpha_one_half_in_pandas():
    """Pandas jumps at alpha = ½ in a gap; the window here is that of its neighbours."""
    x = np.array([1.0, np.nan, 5.0])
    beside = pd.Series(x).ewm(alpha=0.5 + 1e-9, adjust=False).mean()
    at = pd.Series(x).ewm(alpha=0.5, adjust=False).mean()
    found = emaopt.ewm_mean(x, 0.5, adjust=False)
    np.testing.assert_allclose(found, beside, rtol=1e-6)
    assert at[2] == 4.0
    assert float(found[2]) == pytest.approx(11 / 3)


@pytest.mark.parametrize(
    ("steps", "names"), [(0, FUNCTIONS), (1, ("mean", "corr")), (2, ("mean", "var"))]
)
def test_short_sequences(steps, names):
    x, y = np.array([[3.0, 1.0], [5.0, 2.0]])[:, :steps, None]
    for name in names:
        found = run(name, *(a.astype(np.float32) for a in (x, y)), 0.75)
        reference = pandas_run(name, x, y, bias=False, alpha=0.25)
        assert_close(found, reference, 3e-6)
    if steps < 2:
        found = run("mean", x, y, times=np.arange(steps), halflife=1)
        np.testing.assert_array_equal(found, x)


def test_every_axis_and_rank(rng):
    x = rng.normal(size=(3, 3, 3)).astype(np.float32)
    x[0, 1, 2] = np.nan
    flat = emaopt.ewm_var(x.reshape(3, -1), 0.6)
    first = np.asarray(flat).reshape(x.shape)
    for axis in (0, 1, 2, -1):
        found = emaopt.ewm_var(np.moveaxis(x, 0, axis), 0.6, axis=axis)
        np.testing.assert_array_equal(found, np.moveaxis(first, 0, axis))
    assert emaopt.ewm_mean(np.zeros((3, 0), np.float32), 0.5).shape == (3, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.int32, jnp.float32),
        (np.bool_, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (np.float16, jnp.float16),
        (np.float32, jnp.float32),
        (np.float64, jnp.float64),
    ],
)
def test_dtypes(x64, given, expected):
    x = jnp.asarray([1, 0, 1], given)
    reference = pd.Series([1.0, 0, 1]).ewm(alpha=0.5)
    for name in ("mean", "var"):
        found = getattr(emaopt, f"ewm_{name}")(x, 0.5)
        assert found.dtype == expected
        precision = 4 * float(jnp.finfo(expected).eps)
        np.testing.assert_allclose(
            np.asarray(found, np.float64), getattr(reference, name)(), rtol=precision
        )
    assert emaopt.ewm_cov(x, x.astype(jnp.float64), 0.5).dtype == jnp.float64


@pytest.mark.parametrize(
    ("dtype", "decay"),
    [(np.float64, np.float32(0.3)), (np.float32, np.float64(0.9999))],
)
def test_a_decay_of_another_dtype(rng, x64, dtype, decay):
    """It is not rounded to the values, nor its complement to it."""
    x = rng.normal(size=200).astype(dtype)
    x[5] = np.nan
    for name in ("mean", "var"):
        function = getattr(emaopt, f"ewm_{name}")
        found = jax.jit(lambda x, b: function(x, b, adjust=False))(x, decay)  # noqa: B023
        window = pd.Series(x.astype(np.float64)).ewm(
            alpha=1 - float(decay), adjust=False
        )
        bound = TOLERANCE[dtype] * np.abs(x[np.isfinite(x)]).max() ** 2
        assert found.dtype == dtype
        assert_close(np.asarray(found), getattr(window, name)().to_numpy(), bound)


def test_complex_means():
    x = np.array([1 + 2j, np.nan, 3 - 1j], np.complex64)
    x[1] = complex(np.nan, np.nan)
    found = emaopt.ewm_mean(x, 0.5)
    for part in (np.real, np.imag):
        np.testing.assert_allclose(
            part(found), pd.Series(part(x)).ewm(alpha=0.5).mean(), rtol=1e-6
        )


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("path", ["offset", "drift"])
def test_variance_around_a_large_mean(rng, decay, path):
    """Neither the mean of a million nor its motion takes digits from the variance."""
    steps = 5_000
    centre = 1e6 if path == "offset" else np.linspace(0, 1e6, steps)
    x = (centre + rng.normal(size=steps)).astype(np.float32)
    for bias in (False, True):
        window = pd.Series(x.astype(np.float64)).ewm(alpha=1 - decay)
        reference = window.var(bias=bias)
        found = emaopt.ewm_var(x, decay, bias=bias)
        assert_close(np.asarray(found), reference.to_numpy(), 1e-6 * reference)


@ADJUST
@pytest.mark.parametrize("decay", [0.0, 0.7, 0.9999])
def test_linear_constant_and_between(rng, adjust, decay):
    """To 4 ulp, the bound of the core."""
    x, z = samples(rng)
    z[np.isnan(x)] = np.nan
    x, z = x.astype(np.float32), np.where(np.isinf(z), 0, z).astype(np.float32)

    def mean(a):
        return np.asarray(_traced_mean(a, np.float32(decay), adjust=adjust))

    size = 2 * np.abs(x).cumsum(0) + 3 * np.abs(z)
    np.testing.assert_allclose(
        mean(2 * x - 3 * z),
        2 * mean(x) - 3 * mean(z),
        rtol=0,
        atol=1e-6 * np.nanmax(size),
    )
    for constant in (np.where(np.isnan(x), x, 0.3), np.full_like(x, 0.3)):
        y = mean(constant.astype(np.float32))[2:]
        np.testing.assert_allclose(y, np.float32(0.3), rtol=4 * oracles.ULP)
    y, there = mean(x), ~np.isnan(mean(x))
    low, high = (
        extreme.accumulate(np.where(np.isnan(x), seed, x))
        for extreme, seed in ((np.minimum, np.inf), (np.maximum, -np.inf))
    )
    slack = 4 * oracles.ULP * np.nanmax(np.abs(x))
    assert (y >= low - slack)[there].all()
    assert (y <= high + slack)[there].all()


@ADJUST
@pytest.mark.parametrize("gap", [40, 60, 400])
def test_the_past_fades_in_long_gaps(adjust, gap):
    """By its weight, to nothing, and never to NaN."""
    x = np.full(402, np.nan, np.float32)
    x[400 - gap], x[401] = 1e20, 0
    left = 0.3 ** (gap + 1)
    share = left / (left + (1 if adjust else 0.7))
    found = np.asarray(emaopt.ewm_mean(x, 0.3, adjust=adjust))
    assert found[401] == pytest.approx(1e20 * share, rel=1e-6, abs=1e-20)
    assert (found[400 - gap : 401] == np.float32(1e20)).all()


def test_a_constant_has_no_variance():
    assert not np.asarray(emaopt.ewm_var(np.full(9, 1e6 + 0.3), 0.9)[1:]).any()


@ADJUST
def test_weights_sum_to_one(rng, adjust):
    """The derivatives of a mean are the weights."""
    x = samples(rng)[0][:, 0].astype(np.float32)
    jacobian = jax.jit(jax.jacobian(lambda a: emaopt.ewm_mean(a, 0.8, adjust=adjust)))
    weights = jacobian(x)
    expected = oracles.window(np.isfinite(x), np.full(STEPS, 0.8), adjust, rest=0.2)
    np.testing.assert_allclose(weights, np.nan_to_num(expected), atol=1e-6)
    np.testing.assert_allclose(weights.sum(1)[2:], 1, atol=1e-6)


def test_one_trace_for_each_shape(rng):
    x, y = (jnp.asarray(a, jnp.float32) for a in samples(rng))
    traces = []

    @jax.jit
    def corr(x, y, decay, halflife, times, least):
        traces.append(None)
        options = {"times": times, "halflife": halflife, "min_periods": least}
        return emaopt.ewm_corr(x, y, decay), emaopt.ewm_mean(x, **options)

    for k in range(1, 4):
        times = jnp.arange(STEPS) * k
        corr(k * x, y, jnp.float32(0.2 * k), jnp.float32(k), times, k)
    assert len(traces) == 1


def test_vmap_is_a_loop(rng):
    x = samples(rng)[0].astype(np.float32)
    decays = np.array([0.0, 0.5, 0.97], np.float32)
    found = jax.jit(jax.vmap(emaopt.ewm_mean, in_axes=(None, 0)))(x, decays)
    loop = np.stack([_traced_mean(x, decay) for decay in decays])
    np.testing.assert_allclose(found, loop, rtol=1e-6, atol=1e-6)
    columns = jax.jit(jax.vmap(emaopt.ewm_std, in_axes=(1, None), out_axes=1))
    np.testing.assert_array_equal(columns(x, 0.5), emaopt.ewm_std(x, 0.5))


def test_traced_times_are_those_of_numpy(rng):
    x = samples(rng)[0].astype(np.float32)
    times = np.cumsum(rng.integers(0, 5, STEPS))
    known = emaopt.ewm_var(x, times=times, halflife=3)
    jitted = jax.jit(lambda t, h: emaopt.ewm_var(x, times=t, halflife=h))
    np.testing.assert_allclose(jitted(times, 3.0), known, rtol=1e-6)
