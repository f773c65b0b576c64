"""`ema`, the average of the updates: values, accuracy, dtypes, gradients, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax import lax

import emaopt


def run(transformation, updates):
    """Every emitted update and the last state, in one compiled scan over the steps."""

    @jax.jit
    def scanned(updates):
        def step(state, update):
            emitted, state = transformation.update(update, state)
            return state, emitted

        first = jax.tree.map(lambda leaf: leaf[0], updates)
        return lax.scan(step, transformation.init(first), updates)

    state, emitted = scanned(updates)
    return emitted, state


def signals(rng, steps):
    """Noise, constants, drifts and steps, positive or not, over many decades."""
    t = np.arange(1, steps + 1) / steps
    noise = rng.normal(size=(steps, 3))
    columns = [
        noise[:, 0],
        np.ones(steps),
        np.full(steps, -1e-20),
        1e6 + noise[:, 1],
        t,
        np.where(t < 0.5, 1e3, 1.0),
        10.0 ** (12 * t - 6) * (1 + noise[:, 2] ** 2),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


@pytest.mark.parametrize("decay", oracles.DECAYS)
def test_the_error_stays_within_its_bounds(decay, rng):
    values = signals(rng, 20_000)
    plain, _ = run(emaopt.ema(decay), values)
    compensated, _ = run(emaopt.ema(decay, compensated=True), values)
    if decay == 0:
        np.testing.assert_array_equal(plain, values)
        np.testing.assert_array_equal(compensated, values)
    else:
        assert oracles.ulps(compensated, values, decay).max() <= 4
        assert oracles.ulps(plain, values, decay).max() * oracles.ULP <= 2e-5


def test_optax_values_before_and_after_correction():
    # The two steps of Optax's own test of its ema, by hand: 5, then 7, at 0.9.
    first, second = 0.1 * 5, 0.1 * (7 + 0.9 * 5)
    values = jnp.array([5.0, 7.0])
    raw, state = run(emaopt.ema(0.9, debias=False), values)
    np.testing.assert_allclose(raw, [first, second], rtol=2 * oracles.ULP)
    np.testing.assert_allclose(state.m, second, rtol=2 * oracles.ULP)
    emitted, state = run(emaopt.ema(0.9), values)
    expected = [5, second / (1 - 0.9**2)]
    np.testing.assert_allclose(emitted, expected, rtol=2 * oracles.ULP)
    # The correction is not in the state.
    np.testing.assert_allclose(state.m, second, rtol=2 * oracles.ULP)


@pytest.mark.standard_promotion
def test_drops_in_where_optax_is_right(rng):
    values = rng.normal(size=(50, 4)).astype(np.float32)
    for debias in (True, False):
        ours, _ = run(emaopt.ema(0.9, debias), values)
        theirs, _ = run(optax.ema(0.9, debias), values)
        scale = oracles.ema(np.abs(values), 0.9).corrected
        assert np.all(np.abs(ours - theirs) <= 32 * oracles.ULP * scale)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32])
def test_alpha_and_its_power_are_rounded_alike(kind):
    for decay in (0.999, 0.9999, 0.999999, 0.9999999):
        emitted, _ = run(emaopt.ema(kind(decay)), jnp.ones(3))
        np.testing.assert_allclose(emitted, 1, rtol=oracles.ULP)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_updates_do_not_stall(dtype):
    values = jnp.concatenate([jnp.ones(1000, dtype), jnp.zeros(1000, dtype)])
    emitted, state = run(emaopt.ema(0.999), values)
    kept = 0.999**1000
    expected = kept * (1 - kept) / (1 - kept**2)
    assert emitted.dtype == dtype
    assert state.m.dtype == jnp.float32
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(float(emitted[-1]), expected, rtol=half_ulp + 1e-5)
    np.testing.assert_allclose(emitted[999].astype(float), 1)


@pytest.mark.parametrize("constant", [65504.0, 1e-6])
def test_float16_to_the_ends_of_its_range(constant):
    values = jnp.full(3000, constant, jnp.float16)
    emitted, _ = run(emaopt.ema(0.999), values)
    np.testing.assert_array_equal(emitted, values)


def test_200_random_decay_sequences_keep_a_constant(rng):
    steps = 300
    decays = rng.uniform(size=(200, steps))
    decays[:100] = 1 - 10.0 ** rng.uniform(-6, 0, size=(100, steps))
    decays[rng.uniform(size=decays.shape) < 0.1] = 0
    decays[rng.uniform(size=decays.shape) < 0.1] = 1
    decays[0], decays[1] = 0, 1
    decays = jnp.asarray(decays, jnp.float32)
    constants = jnp.asarray(rng.normal(size=200), jnp.float32)

    @jax.jit
    @jax.vmap
    def emit(decays, constant):
        average = emaopt.ema(lambda count: decays[count], compensated=True)

        def step(state, _):
            emitted, state = average.update(constant, state)
            return state, (emitted, state.count)

        return lax.scan(step, average.init(constant), None, length=steps)[1]

    emitted, counts = emit(decays, constants)
    np.testing.assert_array_equal(counts[0], np.arange(1, steps + 1))
    # Until a decay below 1 nothing has been absorbed, and zeros are emitted.
    seen = np.cumprod(np.asarray(decays), axis=1) < 1
    expected = np.where(seen, np.asarray(constants)[:, None], 0)
    assert not seen[1].any()
    np.testing.assert_allclose(emitted, expected, rtol=4 * oracles.ULP, atol=0)


def test_a_schedule_is_corrected_by_the_product_of_its_decays():
    decays = jnp.array([0, 1 / 2, 2 / 3])
    emitted, state = run(
        emaopt.ema(lambda count: decays[count]), jnp.array([1.0, 2.0, 6.0])
    )
    np.testing.assert_allclose(emitted, [1, 1.5, 3], rtol=2 * oracles.ULP)
    assert (state.decay_power, state.weight, state.count) == (0, 1, 3)


@pytest.mark.standard_promotion
def test_a_scheduled_decay_through_inject_hyperparams():
    schedule = optax.piecewise_constant_schedule(0.0, {5: 0.0})
    transformation = optax.inject_hyperparams(emaopt.ema)(
        decay=lambda count: jnp.where(count < 5, schedule(count), 0.99)
    )
    params = jnp.ones(2)
    state = transformation.init(params)
    update = jax.jit(transformation.update)
    for _ in range(12):
        emitted, state = update(jnp.ones(2), state, params)
        np.testing.assert_allclose(emitted, 1, rtol=oracles.ULP)


def test_a_decay_that_rounds_to_1_is_refused_when_it_is_seen():
    ones = jnp.ones(2, jnp.bfloat16)
    narrow = optax.inject_hyperparams(emaopt.ema)(decay=0.999)
    with pytest.raises(
        TypeError, match=r"held in bfloat16.*hyperparam_dtype=jnp.float"
    ):
        narrow.init(ones)
    wide = optax.inject_hyperparams(emaopt.ema, hyperparam_dtype=jnp.float32)(0.999)
    state = wide.init(ones)
    for _ in range(3):
        emitted, state = wide.update(ones, state, ones)
        np.testing.assert_array_equal(emitted, ones)


@pytest.mark.parametrize(
    "decay",
    [0.9, np.float32(0.9), np.float64(0.9), jnp.float32(0.9), lambda count: 0.9, 0],
)
@pytest.mark.parametrize("leaf", [2.5, jnp.bfloat16(2.5), np.float32(2.5)])
def test_one_trace_for_every_kind_of_decay_and_leaf(decay, leaf):
    average = emaopt.ema(decay)
    update = jax.jit(average.update)
    state = average.init(leaf)
    for _ in range(4):
        emitted, state = update(leaf, state)
        assert abs(float(emitted) - 2.5) <= 2.5 * oracles.ULP
    assert update._cache_size() == 1


def test_a_pytree_of_decays_has_a_weight_each(rng):
    values = rng.normal(size=(20, 3)).astype(np.float32)
    decay = {"a": 0.9, "b": lambda count: jnp.where(count == 0, 0.0, 0.5)}
    tree = {"a": {"x": values, "y": values[:, :1]}, "b": values}
    emitted, state = run(emaopt.ema(decay), tree)
    assert jax.tree.structure(state.weight) == jax.tree.structure({"a": 0, "b": 0})
    constant = oracles.ema(values, 0.9).corrected
    varying = oracles.ema(values, [0.0] + [0.5] * 19).corrected
    for found, expected in (
        (emitted["a"]["x"], constant),
        (emitted["a"]["y"], constant[:, :1]),
        (emitted["b"], varying),
    ):
        np.testing.assert_allclose(found, expected, atol=8 * oracles.ULP)


def test_the_past_at_decay_0_is_dropped_infinities_too():
    for decay in (0.0, jnp.float32(0)):
        emitted, _ = run(emaopt.ema(decay), jnp.array([jnp.inf, 1.0, 1.0]))
        np.testing.assert_array_equal(emitted, [np.inf, 1, 1])


@pytest.mark.parametrize("decay", [0.5, lambda count: 0.5])
def test_nonfinite_steps_are_skipped_and_the_last_average_repeated(decay):
    average = emaopt.ema(decay, skip_nonfinite=True)
    values = jnp.array([jnp.nan, 1.0, jnp.inf, 3.0, -jnp.inf])
    emitted, state = run(average, {"x": values, "y": jnp.ones(5)})
    np.testing.assert_allclose(
        emitted["x"], [0, 1, 1, 7 / 3, 7 / 3], rtol=2 * oracles.ULP
    )
    np.testing.assert_array_equal(emitted["y"], [0, 1, 1, 1, 1])
    assert (state.decay_power, state.count) == (0.25, 2)
    poisoned, _ = run(emaopt.ema(decay), {"x": values, "y": jnp.ones(5)})
    assert np.isnan(poisoned["x"]).all()
    np.testing.assert_array_equal(poisoned["y"], 1)


def test_gradients_through_a_skipped_step_are_finite_and_right():
    def last(values, decay):
        average = emaopt.ema(decay, skip_nonfinite=True)
        state = average.init(values[0])
        for value in values:
            emitted, state = average.update(value, state)
        return emitted

    by_value, by_decay = jax.jit(jax.grad(last, argnums=(0, 1)))(
        jnp.array([1.0, jnp.nan, 3.0]), jnp.float32(0.5)
    )
    np.testing.assert_allclose(by_value, [1 / 3, 0, 2 / 3], rtol=2 * oracles.ULP)
    np.testing.assert_allclose(by_decay, -8 / 9, rtol=4 * oracles.ULP)


def test_leaves_that_are_no_floats_pass_through():
    updates = {
        "w": jnp.ones(2),
        "n": jnp.arange(2),
        "f": jnp.array(True),
        "k": jax.random.key(0),
        "z": None,
        "g": np.zeros(2, jax.dtypes.float0),
        "m": optax.MaskedNode(),
    }
    average = emaopt.ema(0.9)
    state = average.init(updates)
    emitted, state = average.update(updates, state)
    emitted, state = average.update(updates, state)
    np.testing.assert_allclose(emitted["w"], 1, rtol=oracles.ULP)
    for name in "nfkg":
        assert emitted[name] is updates[name]
    assert emitted["z"] is None
    assert len(jax.tree.leaves(state.m)) == 1


def test_complex_updates_keep_both_parts():
    emitted, _ = run(emaopt.ema(0.5), jnp.array([1 + 2j, 3 - 1j], jnp.complex64))
    np.testing.assert_allclose(emitted, [1 + 2j, 7 / 3 + 0j], atol=4 * oracles.ULP)


@pytest.mark.parametrize("value", [1.5, np.float64(1.5), np.full(2, 1.5), 0, {}, []])
def test_leaves_without_a_jax_dtype(value):
    average = emaopt.ema(0.9)
    state = average.init(value)
    emitted, state = average.update(value, state)
    jax.tree.map(np.testing.assert_array_equal, emitted, value)


@pytest.mark.usefixtures("x64")
def test_x64_changes_no_float32():
    for decay in (np.float64(0.9), jnp.float64(0.9), lambda count: 0.9):
        average = emaopt.ema(decay)
        state = average.init(jnp.ones(2, jnp.float32))
        emitted, after = jax.jit(average.update)(jnp.ones(2, jnp.float32), state)
        assert emitted.dtype == after.m.dtype == np.float32
        assert after.weight.dtype == after.decay_power.dtype == np.float32
        assert after.count.dtype == np.int32
    wide = emaopt.ema(0.9, accumulator_dtype=jnp.float64)
    emitted, after = wide.update(
        jnp.ones(2, jnp.float32), wide.init(jnp.ones(2, jnp.float32))
    )
    assert (emitted.dtype, after.m.dtype) == (np.float32, np.float64)


@pytest.mark.usefixtures("x64")
def test_gradients_match_finite_differences(rng):
    values = rng.normal(size=(4, 2))

    def loss(values, decay):
        average = emaopt.ema(decay)
        state = average.init(values[0])
        emitted = []
        for value in values:
            update, state = average.update(value, state)
            emitted.append(update)
        return jnp.sum(jnp.sin(jnp.stack(emitted)))

    def reference(values, decay):
        return np.sin(oracles.ema(values, decay).corrected).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    again = jax.jit(jax.grad(jax.checkpoint(lambda values: loss(values, 0.9))))
    for decay in (0.3, 0.9):
        by_value, by_decay = gradient(jnp.asarray(values), jnp.float64(decay))
        h = 1e-6  # the error of a central difference is about h² + 1e-16 / h
        slope = reference(values, decay + h) - reference(values, decay - h)
        np.testing.assert_allclose(by_decay, slope / (2 * h), rtol=1e-7)
        for index in np.ndindex(values.shape):
            shift = np.zeros_like(values)
            shift[index] = h
            slope = reference(values + shift, decay) - reference(values - shift, decay)
            np.testing.assert_allclose(by_value[index], slope / (2 * h), atol=1e-8)
    np.testing.assert_allclose(again(jnp.asarray(values)), by_value, rtol=1e-14)
    _, at_zero = gradient(jnp.asarray(values), jnp.float64(0))
    slope = reference(values, 1e-7) - reference(values, 0)
    np.testing.assert_allclose(at_zero, slope / 1e-7, rtol=1e-5)


DECAYS_OUT_OF_RANGE = [1.0, 1.5, -0.1, float("nan"), float("inf"), jnp.float32(1)]


@pytest.mark.parametrize("decay", DECAYS_OUT_OF_RANGE)
@pytest.mark.parametrize(
    "make", [emaopt.ema, emaopt.params_ema, lambda b: emaopt.overwrite(b, every=2)]
)
def test_decays_out_of_range(make, decay):
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got "):
        make(decay)
    with pytest.raises(ValueError, match=r"decay\['a'\] must be in \[0, 1\), got "):
        make({"a": decay, "b": 0.5})


@pytest.mark.parametrize(
    ("decay", "found"),
    [
        (jnp.bfloat16(0.999), "decay is held in bfloat16, in which 0.999 rounds to 1;"),
        (np.float16(0.5), "decay is held in float16, in which 0.999 rounds to 0.99902"),
        ("0.9", "decay must be a real number, an optax.Schedule or a pytree of them"),
        (None, "decay must be a real number, an optax.Schedule or a pytree of them"),
        (0.5j, "decay must be real, got dtype complex"),
    ],
)
def test_decays_of_the_wrong_type(decay, found):
    with pytest.raises(TypeError, match=found):
        emaopt.ema(decay)


def test_a_schedule_out_of_range_raises_when_it_is_called():
    average = emaopt.ema(lambda count: 1.5)
    state = average.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got 1.5"):
        average.update(jnp.ones(2), state)


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        ({"accumulator_dtype": jnp.bfloat16}, ValueError, "float32 or wider, got bflo"),
        ({"accumulator_dtype": np.int32}, ValueError, "floating-point dtype, got int"),
        ({"accumulator_dtype": np.float64}, ValueError, "needs jax_enable_x64"),
        ({"debias": 1}, TypeError, "debias must be True or False, got 1"),
        ({"compensated": None}, TypeError, "compensated must be True or False, got N"),
        ({"skip_nonfinite": "no"}, TypeError, "skip_nonfinite must be True or False"),
    ],
)
def test_wrong_options(options, error, found):
    with pytest.raises(error, match=found):
        emaopt.ema(0.9, **options)


@pytest.mark.parametrize(
    ("updates", "found"),
    [
        (
            {"w": jnp.ones((3, 2))},
            r"updates at \['w'\]: found shape \(3, 2\), expected",
        ),
        ({"v": jnp.ones(2)}, r"updates at \['w'\]: found nothing, expected a value"),
        ([jnp.ones(2)], "updates at the root: found a list, expected a dict"),
        ({"w": jnp.ones(2, "complex64")}, r"found dtype complex64, expected real"),
        ({"w": jax.random.split(jax.random.key(0))}, "found dtype key<fry>, expected"),
        ({"w": [1.0, 1.0]}, r"updates at \['w'\]: found a list, expected a leaf"),
        ({"w": None}, r"updates at \['w'\]: found a NoneType, expected a leaf"),
    ],
)
def test_updates_that_do_not_fit_the_state(updates, found):
    average = emaopt.ema(0.9)
    state = average.init({"w": jnp.ones(2)})
    for step in (average.update, jax.jit(average.update)):
        with pytest.raises(AssertionError, match=found):
            step(updates, state)
    # The state is as it was.
    average.update({"w": jnp.ones(2)}, state)


def test_decay_zero_keeps_the_sign_of_a_zero():
    average = emaopt.ema(0.0)
    updates = jnp.array([-0.0, 0.0, 5.0])
    emitted, _ = average.update(updates, average.init(updates))
    assert np.signbit(emitted).tolist() == [True, False, False]
