"""``scan``: masks, resets, schedules, trees and chunks; the methods agree on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import ULP, ema

import emaopt

static = ("unobserved", "reverse", "method")
run_known = jax.jit(emaopt.scan, static_argnames=("decay", *static))
run_traced = jax.jit(emaopt.scan, static_argnames=static)
MASKABLE = ("scan", "associative")
METHODS = (*MASKABLE, "blocked")
_SLOW = [pytest.param(m, marks=pytest.mark.slow) for m in ("associative", "blocked")]
each_maskable = pytest.mark.parametrize("method", ["scan", _SLOW[0]])
each_method = pytest.mark.parametrize("method", ["scan", *_SLOW])
T, D = 16, 3


@pytest.fixture
def values(rng):
    return rng.normal(size=(T, D)).astype(np.float32) + 1


def run(state, values, decay, **options):
    """``scan``, jitted; a Python float and a schedule are known while tracing."""
    known = isinstance(decay, float) or callable(decay)
    return (run_known if known else run_traced)(state, values, decay, **options)


def fresh(**options):
    return emaopt.init(jnp.zeros(D), compensated=True, **options)


def harmonic(count):
    return 1 - 1 / (count.astype(jnp.float32) + 2)


def types(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(found, expected):
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_near(found, expected, size, ulp=4):
    """Within ``ulp`` units of 2⁻²³ of ``size``, NaN where NaN is expected."""
    found = np.asarray(found)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    error = np.nan_to_num(np.abs(found - expected)) / (ULP * np.nan_to_num(size, nan=1))
    assert error.max(initial=0) <= ulp


# Steps that are not observed.


@each_maskable
@pytest.mark.parametrize(
    ("x", "decay", "unobserved", "expected", "power"),
    [
        ([1, np.nan, 3], 0.5, "hold", [1, 1, 7 / 3], 0.25),
        ([1, np.nan, 3], 0.6, "hold", [1, 1, 2.25], 0.36),
        ([1, np.nan, 3], 0.6, "decay", [1, 1, 2.4705882], 0.216),
        ([np.nan, np.nan, 2, 4], 0.5, "hold", [np.nan, np.nan, 2, 10 / 3], 0.25),
        ([np.nan, np.nan, 2, 4], 0.5, "decay", [np.nan, np.nan, 2, 10 / 3], 0.0625),
        ([1, np.nan, 3], 0.0, "decay", [1, 1, 3], 0),
        ([np.inf, np.nan, 3, 4], 0.0, "hold", [np.inf, np.inf, 3, 4], 0),
    ],
)
def test_gaps(method, x, decay, unobserved, expected, power):
    x = np.float32(x)
    seen = ~np.isnan(x)
    state = emaopt.init(jnp.float32(0), compensated=True)
    state, found = run(
        state, x, decay, observed=seen, unobserved=unobserved, method=method
    )
    np.testing.assert_allclose(found, expected, rtol=4 * ULP)
    np.testing.assert_allclose(state.decay_power, power, rtol=4 * ULP)
    assert state.count == (seen.sum() if unobserved == "hold" else len(x))
    np.testing.assert_allclose(emaopt.corrected(state), expected[-1], rtol=4 * ULP)


@each_maskable
@pytest.mark.parametrize("unobserved", ["hold", "decay"])
@pytest.mark.parametrize("fine", [False, True], ids=["by step", "by element"])
def test_masks_equal_the_recurrence(method, unobserved, fine, values, rng):
    seen = rng.uniform(size=(T, D) if fine else T) < 0.4
    seen[:2] = False
    decays = np.float32(rng.uniform(0.3, 0.95, (T, D) if fine else T))
    x = np.where(seen if fine else seen[:, None], values, np.nan)
    state, found = run(
        fresh(per_element=fine),
        x,
        decays,
        observed=seen,
        unobserved=unobserved,
        method=method,
    )
    expected = ema(values, decays, seen, unobserved)
    size = ema(np.abs(values), decays, seen, unobserved)
    assert_near(found, expected.corrected, size.corrected, 8)
    assert_near(state.m, expected.m[-1], size.m[-1], 8)
    weight, power = expected.weight[-1], expected.decay_power[-1]
    assert_near(np.broadcast_to(state.weight, D), weight, weight, 8)
    assert_near(np.broadcast_to(state.decay_power, D), power, power, 8)


def test_each_element_is_corrected_by_its_own_weight():
    x = np.float32([[1, np.nan], [3, 5]])
    state = emaopt.init(x[0], per_element=True)
    for method in MASKABLE:
        found = run(state, x, 0.5, observed=~np.isnan(x), method=method)[1]
        np.testing.assert_allclose(found[1], [7 / 3, 5], rtol=ULP)


@pytest.mark.parametrize(
    ("method", "steps", "decay"),
    [
        ("scan", 3000, 0.9),
        ("scan", 3000, np.full(3000, 0.9, np.float32)),
        pytest.param(
            "associative", 40, np.full(40, 0.04, np.float32), marks=pytest.mark.slow
        ),
    ],
    ids=["known", "traced", "associative"],
)
def test_an_average_stays_defined_in_a_gap_of_any_length(method, steps, decay):
    x = np.full(steps, np.nan, np.float32)
    x[0], x[-1] = 3, 7
    half, quarter = steps // 2, steps // 4

    def scan(state, x):
        return run(
            state,
            x,
            decay if isinstance(decay, float) else decay[: len(x)],
            observed=~np.isnan(x),
            unobserved="decay",
            method=method,
        )

    empty = emaopt.init(jnp.float32(0), compensated=True)
    state, found = scan(empty, x)
    np.testing.assert_allclose(found[:-1], 3, rtol=8 * ULP)
    np.testing.assert_allclose(found[-1], 7, rtol=ULP)
    np.testing.assert_allclose(emaopt.corrected(state), 7, rtol=ULP)
    nothing = x[quarter : quarter + half]
    first, gap, last = (scan(empty, part)[0] for part in (x[:half], nothing, x[half:]))
    for state in (first, emaopt.merge(first, gap), scan(first, nothing)[0]):
        np.testing.assert_allclose(emaopt.corrected(state), 3, rtol=8 * ULP)
    np.testing.assert_allclose(emaopt.corrected(emaopt.merge(first, last)), 7, rtol=ULP)
    assert np.isnan(emaopt.corrected(emaopt.merge(gap, gap)))


# Resets.


@pytest.mark.parametrize("unobserved", ["hold", "decay"])
def test_packed_sequences_equal_separate_ones(unobserved, values, rng):
    seen = rng.uniform(size=T) < 0.7
    starts = [0, 5, 6, 11]
    reset = np.isin(np.arange(T), starts)
    decay = np.float32(0.9)
    options = {"unobserved": unobserved}
    packed = run(fresh(), values, decay, observed=seen, reset=reset, **options)[1]
    for start, end in zip(starts, [*starts[1:], T], strict=True):
        part = slice(start, end)
        alone = run(fresh(), values[part], decay, observed=seen[part], **options)[1]
        np.testing.assert_array_equal(packed[part], alone)
    by_merging = run(
        fresh(),
        values,
        decay,
        observed=seen,
        reset=reset,
        method="associative",
        **options,
    )[1]
    size = ema(np.abs(values), decay, seen, unobserved, reset).corrected
    expected = ema(values, decay, seen, unobserved, reset).corrected
    assert_near(by_merging, expected, size, 8)


@each_maskable
def test_nothing_of_what_a_reset_forgets_comes_back(method, values):
    x = values.copy()
    x[3] = np.inf
    reset = np.arange(T) == 10
    state, found = run(fresh(), x, 0.9, reset=reset, method=method)
    expected = ema(values[10:], 0.9)
    assert_near(found[10:], expected.corrected, expected.weight, 16)
    assert np.isfinite(emaopt.corrected(state)).all()
    np.testing.assert_array_equal(state.decay_power, 0)
    assert state.count == T
    # Not even by merging, from where there are values and from where there are none.
    empty = run(fresh(), x, 0.9, reset=reset, observed=np.arange(T) < 10, method=method)
    for later in (state, empty[0]):
        poisoned = run(fresh(), x, 0.9, reset=np.zeros_like(reset), method=method)[0]
        merged = emaopt.merge(poisoned, later)
        assert_same_bits(emaopt.corrected(merged), emaopt.corrected(later))


@each_maskable
@pytest.mark.parametrize("unobserved", ["hold", "decay"])
def test_merged_scans_are_the_scan_of_both(method, unobserved, values, rng):
    seen = rng.uniform(size=T) < 0.6
    reset = np.arange(T) == 12
    decays = np.float32(rng.uniform(0.5, 0.95, T))

    def scan(part, reset):
        return run(
            fresh(),
            values[part],
            decays[part],
            observed=seen[part],
            reset=reset[part],
            unobserved=unobserved,
            method=method,
        )[0]

    for resets in (reset, np.zeros_like(reset)):
        first, second = scan(slice(0, 8), resets), scan(slice(8, T), resets)
        whole, merged = scan(slice(0, T), resets), emaopt.merge(first, second)
        assert merged.count == whole.count
        np.testing.assert_allclose(merged.weight, whole.weight, rtol=8 * ULP)
        np.testing.assert_allclose(merged.decay_power, whole.decay_power, rtol=8 * ULP)
        np.testing.assert_allclose(merged.m, whole.m, rtol=0, atol=16 * ULP)


# Schedules, reverse, chunks, trees, empty sequences.


@pytest.mark.parametrize(
    ("reverse", "unobserved"),
    [(False, "hold"), pytest.param(True, "decay", marks=pytest.mark.slow)],
)
def test_a_schedule_is_called_with_the_count_as_in_update(
    reverse, unobserved, values, rng
):
    seen = rng.uniform(size=T) < 0.6

    def step(state, now):
        x, observed = now
        state = emaopt.update(
            state, x, harmonic, observed=observed, unobserved=unobserved
        )
        return state, emaopt.corrected(state)

    start = emaopt.update(fresh(), values[0], 0.5)
    expected = jax.lax.scan(step, start, (values, seen), reverse=reverse)
    for method in MASKABLE:
        found = run(
            start,
            values,
            harmonic,
            observed=seen,
            unobserved=unobserved,
            reverse=reverse,
            method=method,
        )
        assert found[0].count == expected[0].count
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=16 * ULP)


def test_known_schedules():
    state = emaopt.init(jnp.float32(0))
    uniform = emaopt.schedules.uniform()
    found = run(state, np.float32([1, 2, 6]), uniform)[1]
    np.testing.assert_allclose(found, [1, 1.5, 3], rtol=ULP)
    # Counts go on in the next call, and a schedule of a constant is a constant.
    state, _ = run(state, np.float32([1, 2]), uniform)
    np.testing.assert_allclose(run(state, np.float32([6]), uniform)[1], [3], rtol=ULP)
    found = run(state, np.float32([6]), lambda count: 0.75)[1]
    np.testing.assert_allclose(found, (0.75 * 1.5 + 0.25 * 6), rtol=ULP)
    # One that returns 1 counts and changes nothing.
    start = emaopt.init(jnp.float32(0))
    late = emaopt.scan(
        start,
        np.float32([4, 5]),
        lambda c: jnp.where(c < 1, jnp.float32(1), jnp.float32(0.5)),
    )
    np.testing.assert_array_equal(late[1], [np.nan, 5])
    assert late[0].count == 2


@each_method
def test_reverse_is_flipping(method, values):
    options = {"decay": np.float32(0.9), "method": method}
    state, found = run(fresh(), values, reverse=True, **options)
    other, expected = run(fresh(), values[::-1], **options)
    np.testing.assert_allclose(found[::-1], expected, rtol=0, atol=16 * ULP)
    np.testing.assert_allclose(state.m, other.m, rtol=0, atol=16 * ULP)
    if method == "scan":
        assert_same_bits((state, found[::-1]), (other, expected))


@pytest.mark.parametrize("compensated", [True, False])
@pytest.mark.parametrize("kind", ["plain", "masks", "schedule"])
def test_a_sequence_in_chunks_is_the_whole(compensated, kind, values, rng):
    seen = rng.uniform(size=T) < 0.7
    reset = np.arange(T) == 9
    start = emaopt.init(values[0], compensated=compensated)

    def scan(state, part):
        if kind == "plain":
            return run(state, values[part], np.float32(0.99))
        decay = harmonic if kind == "schedule" else np.float32(1 - 0.1 / (1 + part))
        masks = {"observed": seen[part], "reset": reset[part]}
        return run(state, values[part], decay, **masks)

    whole = scan(start, np.arange(T))
    for cuts in ((1,), (9,), range(1, T), range(4, T, 4)):
        state, outputs = start, []
        for part in np.split(np.arange(T), cuts):
            state, out = scan(state, part)
            outputs.append(out)
        found = state, np.concatenate(outputs)
        if compensated:
            assert_same_bits(found, whole)
        assert state.count == whole[0].count
        size = np.nanmax(np.abs(whole[1]))
        np.testing.assert_allclose(found[1], whole[1], rtol=0, atol=T * ULP * size)


@each_method
def test_trees_of_values_and_of_decays(method, values):
    x = {"a": values, "b": [values[:, 0], np.arange(T)], "none": values}
    decay = {"a": 0.5, "b": jnp.float32(0.9), "none": 0.0}
    if method != "blocked":
        decay["a"] = np.full(T, 0.5, np.float32)
    first = {"a": values[0], "b": [values[0, 0], 0], "none": optax.MaskedNode()}
    state = emaopt.init(first, decay={"a": 0.5, "b": 0.9, "none": 0.0})
    state, found = run(state, x, decay, method=method)
    for out, series, b in (
        (found["a"], values, 0.5),
        (found["b"][0], values[:, 0], np.float32(0.9)),
        (found["b"][1], np.arange(T), np.float32(0.9)),
    ):
        assert out.dtype == np.float32
        size = np.maximum(ema(abs(series), b).corrected, 1e-26)
        assert_near(out, ema(series, b).corrected, size, 8)
    np.testing.assert_allclose(state.weight["a"], 1 - 0.5**T, rtol=ULP)


@each_method
@pytest.mark.parametrize("compensated", [True, False])
def test_no_steps_and_one(method, compensated, values):
    start = emaopt.init(values[0], compensated=compensated)
    start, _ = run(start, values, 0.9)
    for decay in (0.9, np.float32(0.9)):
        state, found = run(start, values[:0], decay, method=method)
        assert found.shape == (0, D)
        assert_same_bits(state, start)
        state, found = run(start, values[:1], decay, method=method)
        once = emaopt.update(start, values[0], decay)
        np.testing.assert_allclose(found[0], emaopt.corrected(once), rtol=8 * ULP)
    if method != "blocked":
        masks = {"observed": np.ones(0, bool), "reset": np.ones(0, bool)}
        state, _ = run(start, values[:0], harmonic, **masks, method=method)
        assert_same_bits(state, start)


@each_method
def test_empty_leaves_and_trees(method):
    state, found = run(emaopt.init({}), {}, 0.9, method=method)
    assert found == {}
    assert state.count == 0
    state, found = run(
        emaopt.init(jnp.zeros((0, 2))), np.zeros((40, 0, 2)), 0.9, method=method
    )
    assert found.shape == (40, 0, 2)
    np.testing.assert_allclose(state.decay_power, 0.9**40, rtol=8 * ULP)
    if method != "blocked":
        state, _ = run(emaopt.init({}), {}, np.full(5, 0.5), method=method)
        assert (state.count, state.weight) == (5, 1 - 0.5**5)


# Types.


@each_method
@pytest.mark.parametrize("compensated", [True, False])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (np.float32, np.float32),
        (np.float16, np.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (np.int32, np.float32),
        (np.bool_, np.float32),
        (np.complex64, np.complex64),
    ],
)
def test_types_are_kept(method, compensated, dtype, result):
    if method == "blocked" and dtype == np.complex64:
        return
    x = np.array([1, 0, 1, 1]).astype(dtype)
    start = emaopt.init(x[0], compensated=compensated)
    state, found = jax.eval_shape(
        lambda state: emaopt.scan(state, x, 0.5, method=method), start
    )
    assert (found.dtype, found.weak_type) == (result, False)
    assert types(state) == types(start)
    if not compensated and method == "scan":
        found = emaopt.scan(start, x, 0.5, method=method)[1]
        eps = max(float(jnp.finfo(result).eps), ULP)
        error = np.abs(np.asarray(found, np.complex64) - [1, 1 / 3, 5 / 7, 13 / 15])
        assert error.max() <= eps


def test_complex_and_low_precision_values():
    z = np.complex64([1 + 2j, 3 - 1j])
    for method in MASKABLE:
        found = run(emaopt.init(z[0]), z, 0.5, method=method)[1]
        np.testing.assert_allclose(found, [1 + 2j, 7 / 3], atol=2 * ULP)
    for method in METHODS:
        for value in (65504, 1e-6):
            x = np.full(40, value, np.float16)
            found = run(emaopt.init(x[0]), x, 0.999, method=method)[1]
            np.testing.assert_array_equal(found, x)


@each_method
def test_wide_types(method, x64, rng):
    x = {"a": rng.normal(size=(T, D)), "b": rng.normal(size=T).astype(np.float32)}
    start = emaopt.init(jax.tree.map(lambda v: v[0], x), compensated=True)
    decays = [0.9, np.float32(0.9), np.float64(0.9)]
    if method != "blocked":
        decays += [np.full(T, 0.9), np.full(T, 0.9, np.float32)]
    for decay in decays:
        state, found = emaopt.scan(start, x, decay, method=method)
        assert (found["a"].dtype, found["b"].dtype) == (np.float64, np.float32)
        assert types(state) == types(start)
        expected = ema(
            x["a"], np.float64(decay if np.ndim(decay) == 0 else decay[0])
        ).corrected
        np.testing.assert_allclose(found["a"], expected, atol=1e-14)
    if method != "blocked":
        seen = rng.uniform(size=T) < 0.5
        seen[0] = True
        masked = run(start, x, 0.9, observed=seen, unobserved="decay", method=method)[1]
        expected = ema(x["a"], 0.9, seen, "decay").corrected
        np.testing.assert_allclose(masked["a"], expected, atol=1e-14)


def test_one_trace_per_shape(values):
    traces = []

    @functools.partial(jax.jit, static_argnames="method")
    def step(state, x, decay, method):
        traces.append(method)
        return emaopt.scan(state, x, decay, method=method)

    for method in METHODS:
        state = fresh()
        for decay in (jnp.float32(0.9), jnp.float32(0.5), np.float32(0.1)):
            state, _ = step(state, values, decay, method)
    assert traces == list(METHODS)
    assert state.count == 3 * T


# Errors.


def refused(error, message, *, x=None, start=None, decay=0.9, **options):
    x = np.ones((T, D), np.float32) if x is None else x
    with pytest.raises(error, match=message):
        emaopt.scan(fresh() if start is None else start, x, decay, **options)


def test_values_that_do_not_fit_the_state():
    refused(AssertionError, r"values at the root: found shape \(\)", x=np.float32(1))
    refused(
        AssertionError,
        r"values at the root: .* \(16, 2\), .* \(16, 3\)",
        x=np.ones((T, 2)),
    )
    refused(
        AssertionError,
        r"values at \['b'\]: found shape \(4,\), expected \(3,\)",
        start=emaopt.init({"a": jnp.float32(0), "b": jnp.float32(0)}),
        x={"a": np.ones(3), "b": np.ones(4)},
    )
    refused(AssertionError, "values at the root: found a dict", x={"a": np.ones(3)})
    refused(
        AssertionError,
        "values at the root: found dtype complex64, expected real numbers",
        x=np.ones((T, D), np.complex64),
    )


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones(T), TypeError, "observed must be bool, got dtype float64"),
        (True, ValueError, r"observed does not fit .*found shape \(\), expected \(16,"),
        (np.ones(5, bool), ValueError, r"observed does not .*\(5,\), expected \(16,\)"),
        (np.ones((T, D), bool), ValueError, r"\(16, 3\), .*init\(..., per_element=Tru"),
        ([True] * T, ValueError, "observed is finer than the state: found structure"),
    ],
    ids=["float", "scalar", "short", "fine", "list"],
)
def test_masks_that_do_not_fit(mask, error, message):
    refused(error, message, observed=mask)


def test_masks_that_do_not_fit_the_elements():
    message = r"found shape \(16, 2\), expected \(16,\) or \(16, 3\)"
    start = fresh(per_element=True)
    refused(ValueError, message, start=start, observed=np.ones((T, 2), bool))
    message = r"decay has shape \(16, 2\), expected \(\) or \(16,\) or \(16, 3\)"
    refused(ValueError, message, start=start, decay=np.full((T, 2), 0.5))


@pytest.mark.parametrize(
    ("reset", "error", "message"),
    [
        (np.ones(T, int), TypeError, "reset must be bool, got dtype int"),
        ([True] * T, TypeError, "reset must be bool, got list"),
        (True, ValueError, r"reset .*each step: found shape \(\), expected \(16,\)"),
        (np.ones(5, bool), ValueError, r"found shape \(5,\), expected \(16,\)"),
        (np.ones((T, D), bool), ValueError, r"shape \(16, 3\), expected \(16,\)"),
    ],
    ids=["int", "list", "scalar", "short", "fine"],
)
def test_resets_that_do_not_fit(reset, error, message):
    refused(error, message, reset=reset)


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        (1.0, ValueError, r"decay must be in \[0, 1\), got 1.0"),
        (np.append(np.zeros(T - 1), 1), ValueError, r"decay must be in \[0, 1\), got"),
        (np.full(5, 0.9), ValueError, r"decay has shape \(5,\), expected \(\) or \(16"),
        (np.full((T, D), 0.9), ValueError, r"Decays within a leaf need init\(..., per"),
        (np.full(T, 0.9, np.float16), TypeError, "decay is held in float16, in which"),
        (lambda count: 2.0, ValueError, r"decay must be in \[0, 1\], got"),
        ({"a": 0.5}, ValueError, "decay is finer than the state: found structure"),
    ],
    ids=["range", "ranges", "short", "fine", "narrow", "schedule", "tree"],
)
def test_decays_that_do_not_fit(decay, error, message):
    refused(error, message, decay=decay)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"method": "fast"},
            ValueError,
            "method must be one of 'auto', 'scan', 'assoc",
        ),
        ({"unobserved": "skip"}, ValueError, "unobserved must be one of 'hold', 'deca"),
        ({"reverse": 1}, TypeError, "reverse must be True or False, got 1"),
        ({"axis_name": "time"}, ValueError, "axis_name='time' is no axis here: call"),
    ],
    ids=lambda case: str(case)[:12],
)
def test_options_that_do_not_exist(options, error, message):
    refused(error, message, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"observed": np.ones(T, bool)},
        {"reset": np.ones(T, bool)},
        {"decay": np.full(T, 0.9, np.float32)},
        {"decay": harmonic},
        {
            "start": emaopt.init(jnp.zeros(D, jnp.complex64)),
            "x": np.ones((T, D), np.complex64),
        },
    ],
    ids=["observed", "reset", "decays", "schedule", "complex"],
)
def test_where_blocked_does_not_apply(options):
    message = 'method="blocked" needs real values, one decay for all steps, no observed'
    refused(ValueError, message, method="blocked", **options)


def test_a_state_of_the_whole_sequence():
    x = np.ones(4, np.float32)
    with pytest.raises(AssertionError, match=r"state is of one step: init\(values\[0"):
        emaopt.scan(emaopt.init(x), x, 0.5)
