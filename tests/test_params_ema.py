"""`params_ema`: which parameters are averaged, when, and at what cost."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import emaopt


def absorb(transformation, values):
    """The state after calls that leave the parameters at each of the values."""

    @jax.jit
    def scanned(values):
        params = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), values)

        def call(state, after):
            _, state = transformation.update(after, state, params)
            average = emaopt.eval_params(state, params)
            return state, average

        return lax.scan(call, transformation.init(params), values)

    return scanned(values)


def train(optimizer, params, gradients):
    """The parameters after each step, in eager mode, and the last state."""
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    history = []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history, state


def test_the_average_is_of_the_parameters_after_the_step():
    optimizer = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    history, state = train(optimizer, jnp.float32(0), [jnp.float32(-1)] * 3)
    average = emaopt.eval_params(state, history[-1])
    np.testing.assert_allclose(average, 17 / 7, rtol=2 * oracles.ULP)


@pytest.mark.parametrize("decay", oracles.DECAYS)
def test_the_error_stays_within_its_bounds(decay, rng):
    t = np.arange(1, 20_001) / 20_000
    noise = rng.normal(size=(20_000, 2))
    columns = [noise[:, 0], 1 + 0 * t, t, 100 + noise[:, 1], np.sin(89 * t)]
    values = np.stack(columns, axis=1).astype(np.float32)
    _, plain = absorb(emaopt.params_ema(decay), values)
    _, compensated = absorb(emaopt.params_ema(decay, compensated=True), values)
    if decay == 0:
        np.testing.assert_array_equal(plain, values)
        np.testing.assert_array_equal(compensated, values)
    else:
        assert oracles.ulps(compensated, values, decay).max() <= 4
        assert oracles.ulps(plain, values, decay).max() * oracles.ULP <= 2e-5


def scheduled(count):
    return jnp.where(count == 0, 0.25, 0.75)


@pytest.mark.parametrize("decay", [0.9, jnp.float32(0.9), scheduled])
@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize(("every", "start"), [(1, 0), (1, 3), (3, 0), (4, 2), (7, 5)])
def test_every_start_and_warm_start(decay, warm_start, every, start, rng):
    values = rng.normal(size=30).astype(np.float32)
    state, averages = absorb(
        emaopt.params_ema(decay, every=every, start=start, warm_start=warm_start),
        values,
    )
    calls = np.arange(1, 31)
    due = (calls > start) & ((calls - start) % every == 0)
    # Float64, by the words of the docstring: what is averaged, and with which decay.
    m, w, absorbed, expected = 0.0, 0.0, 0, []
    if warm_start:
        m, w = 0.0, 1.0  # the parameters of init are 0
    for call, x in zip(calls, values.astype(np.float64), strict=True):
        if warm_start and call <= start:
            m = x
        elif due[call - 1]:
            b = (0.75 if absorbed else 0.25) if callable(decay) else 0.9**every
            m, w, absorbed = b * m + (1 - b) * x, b * w + (1 - b), absorbed + 1
        expected.append(m / w if w else 0.0)
    np.testing.assert_allclose(averages, expected, atol=16 * oracles.ULP)
    assert (state.step, state.ema.count) == (30, due.sum())


def test_every_and_start_as_hyperparameters(rng):
    values = rng.normal(size=20).astype(np.float32)
    injected = optax.inject_hyperparams(emaopt.params_ema)
    options = {"decay": 0.9, "every": 3, "start": 2}
    state, averages = absorb(injected(**options), values)
    _, expected = absorb(emaopt.params_ema(**options), values)
    np.testing.assert_allclose(averages, expected, atol=8 * oracles.ULP)
    state.hyperparams["every"] = jnp.asarray(1)
    state = injected(**options).update(jnp.float32(9), state, jnp.float32(0))[1]
    assert state.inner_state.ema.count == 7


def test_known_answers_of_every_and_start():
    mean = emaopt.params_ema(emaopt.schedules.uniform(), every=4)
    _, averages = absorb(mean, jnp.arange(1.0, 9.0))
    np.testing.assert_allclose(averages[-1], 6)
    warm = emaopt.params_ema(0.9, start=2, warm_start=True)
    _, averages = absorb(warm, jnp.array([1.0, 5.0, 7.0]))
    expected = [1, 5, 0.9 * 5 + 0.1 * 7]
    np.testing.assert_allclose(averages, expected, rtol=2 * oracles.ULP)


@pytest.mark.parametrize(
    "options",
    [{}, {"warm_start": True}, {"start": 2, "warm_start": True}, {"start": 2}],
)
def test_a_constant_stays_however_the_average_starts(options):
    average = emaopt.params_ema(0.9, **options)
    params, zero = jnp.float32(4), jnp.float32(0)
    state = average.init(params)
    for _ in range(6):
        np.testing.assert_allclose(emaopt.eval_params(state, params), 4, rtol=1e-7)
        _, state = average.update(zero, state, params)


def test_a_decay_of_1_absorbs_nothing():
    decays = jnp.array([1.0, 0.5])
    average = emaopt.params_ema(lambda count: decays[count])
    state, zero = average.init(jnp.float32(4)), jnp.float32(0)
    _, state = average.update(zero, state, jnp.float32(4))
    assert emaopt.eval_params(state, jnp.float32(7)) == 7
    _, state = average.update(zero, state, jnp.float32(4))
    assert emaopt.eval_params(state, jnp.float32(7)) == 4
    assert state.ema.count == 2


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(every):
    average = emaopt.params_ema(0.5, every=every, skip_nonfinite=True)
    values = jnp.array([1.0, jnp.nan, 3.0, -jnp.inf])
    finite = jnp.array([1.0, 3.0])
    state, averages = absorb(average, {"x": values, "y": jnp.zeros(4)})
    expected, _ = absorb(average, {"x": finite, "y": jnp.zeros(2)})
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    if every == 1:
        np.testing.assert_allclose(averages["x"], [1, 1, 7 / 3, 7 / 3], rtol=2e-7)


def test_a_call_in_between_reads_and_writes_nothing_of_the_average():
    params = jnp.ones(1024)

    def compiled(**options):
        average = emaopt.params_ema(0.9, **options)

        def step(state, params):
            return average.update(jnp.zeros_like(params), state, params)[1]

        state = average.init(params)
        return jax.jit(step, donate_argnums=0).lower(state, params).compile()

    def touching(line):
        return "f32[1024]" in line and not re.search(r"parameter\(|tuple|ROOT", line)

    text = compiled(every=10).as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    (branch,) = [line for line in entry if " conditional(" in line]
    outside = [line for line in entry[1:] if touching(line) and line != branch]
    # Outside the conditional the average is only taken apart, and not copied.
    moved = [line for line in outside if "get-tuple-element" not in line]
    assert not [line for line in moved if "copy" in line or "m.1" in line], moved
    kept = re.search(r"branch_computations=\{%([\w.]+)", branch)[1]
    body = text[text.index(f"\n%{kept} ") :]
    body = body[: body.index("\n}")].splitlines()[2:]
    assert not [line for line in body if touching(line)], body


def test_several_averages_share_one_sum():
    optimizer = optax.named_chain(
        ("sgd", optax.sgd(0.1)),
        *((name, emaopt.params_ema(b)) for name, b in [("a", 0.9), ("b", 0.99)]),
        ("c", emaopt.params_ema(lambda count: 0.999)),
    )
    params = jnp.ones(1024)

    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    lowered = jax.jit(step).lower(params, optimizer.init(params), params)
    entry = lowered.compile().as_text().split("ENTRY")[1]
    # `params` is used by one computation alone, whose result all averages take.
    name = re.search(r"(%[\w.]+) = f32\[1024\]\S* parameter\(0\)", entry)[1]
    users = re.findall(rf"(%[\w.]+) = [^\n]*\(.*{re.escape(name)}\b", entry)
    assert len(users) == 1, users
    assert len(re.findall(rf"fusion\([^\n]*{re.escape(users[0])}\b", entry)) >= 3


def test_a_state_made_from_the_parameters_is_donated_again_and_again():
    params = {"w": jnp.ones(3), "b": jnp.zeros((), jnp.bfloat16)}
    for options in ({}, {"compensated": True, "warm_start": True, "every": 2}):
        optimizer = optax.chain(optax.scale(-1.0), emaopt.params_ema(0.5, **options))

        def step(carry, optimizer=optimizer):
            params, state = carry
            updates, state = optimizer.update(params, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step, donate_argnums=0)
        carry = jax.tree.map(jnp.copy, params), optimizer.init(params)
        for _ in range(3):
            carry = step(carry)
        assert step._cache_size() == 1
        assert float(params["w"][0]) == 1  # init took no buffer of the parameters


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "options", [{}, {"compensated": True}, {"every": 3, "start": 2, "warm_start": True}]
)
def test_sharding_is_that_of_the_parameters(axes, options):
    kind = getattr(AxisType, axes)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((8, 2)), sharding)}
        average = emaopt.params_ema(0.9, **options)

        def check(state, leaf=None):
            for m in jax.tree.leaves((state.ema.m, state.ema.residual.of_m, leaf)):
                assert m.sharding.is_equivalent_to(sharding, 2), m.sharding

        check(average.init(params))
        abstract = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
        if not options.get("warm_start"):
            check(average.init({"w": abstract}))
        state = jax.jit(average.init)(params)
        check(state)
        step = jax.jit(average.update).lower(params, state, params).compile()
        assert not re.search(r"all-|collective|permute", step.as_text())
        for update in (step, average.update):
            _, state = update(params, state, params)
            check(state)
        evaluate = jax.jit(emaopt.eval_params)
        check(state, evaluate(state, params))
        text = evaluate.lower(state, params).compile().as_text()
        assert not re.search(r"all-|collective|permute", text)


def test_before_the_first_absorption_evaluation_gives_the_parameters():
    params = {"w": jnp.array([1.0, -2.0]), "b": jnp.bfloat16(3)}
    state = emaopt.params_ema(0.9).init(params)

    def loss(params):
        average = emaopt.eval_params(state, params)
        return jnp.sum(average["w"] ** 2) + average["b"].astype(jnp.float32)

    for evaluate in (emaopt.eval_params, jax.jit(emaopt.eval_params)):
        found = evaluate(state, params)
        jax.tree.map(np.testing.assert_array_equal, found, params)
    gradient = jax.jit(jax.grad(loss))(params)
    np.testing.assert_array_equal(gradient["w"], [2, -4])
    assert gradient["b"] == 1


def test_gradients_through_training_with_an_average(rng):
    start = rng.normal(size=3)

    def loss(params, decay, rate):
        optimizer = optax.chain(optax.sgd(rate), emaopt.params_ema(decay, every=2))
        state = optimizer.init(params)
        for _ in range(4):
            updates, state = optimizer.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(emaopt.eval_params(state, params))

    # The parameters after step t are p(1 − rate)^t; β² is the decay of an absorption.
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(
        jnp.asarray(start, jnp.float32), jnp.float32(0.5), jnp.float32(0.1)
    )
    p2, p4, b = 0.9**2, 0.9**4, 0.25
    by_params = (b * p2 + p4) / (b + 1)
    by_power = (p2 - p4) / (b + 1) ** 2 * start.sum()
    np.testing.assert_allclose(found[0], by_params, rtol=8 * oracles.ULP)
    np.testing.assert_allclose(found[1], by_power * 2 * 0.5, rtol=32 * oracles.ULP)


@pytest.mark.parametrize("gradients", [jnp.bfloat16, jnp.float32])
@pytest.mark.standard_promotion
def test_bfloat16_parameters_after_the_step(gradients, rng):
    params = jnp.asarray(rng.normal(size=512), jnp.bfloat16)
    updates = jnp.asarray(rng.normal(size=512), gradients)
    average = emaopt.params_ema(0.9)
    state = average.init(params)
    expected = optax.apply_updates(params, updates)
    for update in (average.update, jax.jit(average.update)):
        emitted, after = update(updates, state, params)
        assert (emitted.dtype, after.ema.m.dtype) == (gradients, np.float32)
        found = emaopt.eval_params(after, params)
        assert found.dtype == jnp.bfloat16
        # Bit for bit, though XLA would keep the sum in float32.
        np.testing.assert_array_equal(found, expected)
        m = np.asarray(after.ema.m, np.float64) / float(after.ema.weight)
        np.testing.assert_allclose(m, np.float64(expected), rtol=2 * oracles.ULP)


def test_bfloat16_parameters_do_not_stall():
    values = jnp.concatenate([jnp.ones(1000), jnp.zeros(1000)]).astype(jnp.bfloat16)
    _, averages = absorb(emaopt.params_ema(0.999), values)
    kept = 0.999**1000
    np.testing.assert_allclose(
        float(averages[-1]), kept * (1 - kept) / (1 - kept**2), rtol=2**-8 + 1e-5
    )


def test_leaves_that_are_no_floats_are_the_latest():
    params = {
        "w": jnp.ones(2),
        "n": jnp.arange(2),
        "f": jnp.array(True),
        "k": jax.random.key(0),
        "z": None,
        "m": optax.MaskedNode(),
    }
    none = np.zeros(2, jax.dtypes.float0)
    updates = params | {"w": jnp.ones(2), "n": none, "f": none, "k": none}
    for options in ({}, {"every": 2, "warm_start": True, "start": 1}):
        average = emaopt.params_ema(0.5, **options)
        state = average.init(params)
        emitted, state = average.update(updates, state, params)
        emitted, state = average.update(updates, state, params)
        assert all(emitted[name] is updates[name] for name in updates)
        assert len(jax.tree.leaves(state.ema.m)) == 1
        found = emaopt.eval_params(state, params)
        np.testing.assert_array_equal(found["w"], 2)
        for name in "nfk":
            assert found[name] is params[name]


def test_infinities_are_dropped_at_decay_0():
    for decay in (0.0, jnp.float32(0), lambda count: 0.0):
        _, averages = absorb(emaopt.params_ema(decay), jnp.array([jnp.inf, 1.0, 1.0]))
        np.testing.assert_array_equal(averages, [np.inf, 1, 1])


@pytest.mark.parametrize("params", [jnp.zeros((0, 3)), jnp.float32(1), {}, 1.0, [], ()])
def test_empty_and_scalar_parameters(params):
    for options in ({}, {"every": 2, "skip_nonfinite": True, "compensated": True}):
        average = emaopt.params_ema(0.5, **options)
        state = average.init(params)
        for _ in range(2):
            _, state = average.update(params, state, params)
        doubled = jax.tree.map(lambda p: p + p, params)
        jax.tree.map(
            np.testing.assert_allclose, emaopt.eval_params(state, params), doubled
        )


def test_complex_parameters_keep_both_parts():
    _, averages = absorb(emaopt.params_ema(0.5), jnp.array([1 + 2j, 3 - 1j]))
    np.testing.assert_allclose(averages[-1], 7 / 3, atol=4 * oracles.ULP)


def test_abstract_evaluation_and_no_jit_agree_with_jit(rng):
    values = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    average = emaopt.params_ema(0.9, every=2, start=1, warm_start=True)
    state, _ = absorb(average, values)
    abstract = jax.eval_shape(average.init, values[0])
    abstract = jax.eval_shape(average.update, values[0], abstract, values[0])[1]
    with jax.disable_jit():
        eager = average.init(jnp.zeros(3))
        for value in values:
            _, eager = average.update(value, eager, jnp.zeros(3))
    assert jax.tree.map(jnp.shape, eager) == jax.tree.map(jnp.shape, abstract)
    np.testing.assert_allclose(eager.ema.m, state.ema.m, atol=4 * oracles.ULP)


def test_a_state_is_resumed_from_a_pickle_bit_for_bit():
    average = emaopt.params_ema(0.5, compensated=True)
    values = jnp.array([1.0, 2.0, 3.0, 4.0])
    whole, _ = absorb(average, values)
    state = average.init(jnp.float32(0))
    for index, value in enumerate(values):
        if index == 2:
            state = pickle.loads(pickle.dumps(state))
        _, state = jax.jit(average.update)(value, state, jnp.float32(0))
    jax.tree.map(np.testing.assert_array_equal, state, whole)


def test_the_step_saturates():
    average = emaopt.params_ema(0.5)
    state = average.init(jnp.float32(0))._replace(step=jnp.int32(2**31 - 1))
    _, state = average.update(jnp.float32(1), state, jnp.float32(0))
    assert (state.step, state.ema.count) == (2**31 - 1, 1)


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        ({"every": 0}, ValueError, "every must be a whole number >= 1, got 0"),
        ({"every": 1.5}, ValueError, "every must be a whole number >= 1, got 1.5"),
        ({"every": float("nan")}, ValueError, "every must be a whole number >= 1"),
        ({"every": True}, TypeError, "every must be a whole number >= 1, got True"),
        ({"every": "2"}, TypeError, "every must be a whole number >= 1, got '2'"),
        ({"start": -1}, ValueError, "start must be a whole number >= 0, got -1"),
        ({"start": 2**31}, ValueError, "start must be a whole number >= 0, got 21"),
        ({"start": None}, TypeError, "start must be a whole number >= 0, got None"),
        ({"warm_start": 2}, TypeError, "warm_start must be True or False, got 2"),
        ({"accumulator_dtype": "float16"}, ValueError, "float32 or wider, got float16"),
    ],
)
def test_wrong_options(options, error, found):
    with pytest.raises(error, match=re.escape(found)):
        emaopt.params_ema(0.9, **options)


def test_no_nan_is_made_on_the_way():
    params = jnp.ones(2)
    options = {"every": 2, "start": 1, "warm_start": True, "skip_nonfinite": True}
    with jax.debug_nans(True), jax.debug_infs(True):
        for average in (emaopt.params_ema(0.9), emaopt.params_ema(0.9, **options)):
            state = average.init(params)
            for _ in range(2):
                emaopt.eval_params(state, params)
                _, state = average.update(params, state, params)


def test_a_traced_every_takes_the_decay_to_its_power_exactly():
    @jax.jit
    def weight(decay, every):
        average = emaopt.params_ema(decay, every=every)
        state = average.init(jnp.float32(0))._replace(step=every - 1)
        return average.update(jnp.float32(1), state, jnp.float32(0))[1].ema.weight

    for decay in (0.999999, 0.9, 0.0):
        for every in (1, 2, 1000, 100_000, 10**7):
            traced = np.float64(np.float32(decay))
            expected = -np.expm1(every * np.log(traced)) if decay else 1
            found = weight(jnp.float32(decay), jnp.int32(every))
            # An ulp for each of two times 31 products.
            np.testing.assert_allclose(found, expected, rtol=62 * oracles.ULP)


def test_errors_of_update():
    average = emaopt.params_ema(0.9)
    params = {"w": jnp.ones(3)}
    state = average.init(params)
    with pytest.raises(ValueError, match="params_ema averages the parameters after"):
        average.update(params, state)
    cases = [
        (params, {"w": jnp.ones((2, 3))}, r"params at \['w'\]: found shape \(2, 3\)"),
        ({"w": jnp.ones(1)}, params, r"updates at \['w'\]: found shape \(1,\), expect"),
        (
            {"w": jnp.ones(3, "complex64")},
            params,
            "found dtype complex64, expected a re",
        ),
        (params, {"v": jnp.ones(3)}, r"params at \['w'\]: found nothing, expected a v"),
        (params, {0: jnp.ones(3)}, r"params at \['w'\]: found nothing, expected a val"),
        (params, (jnp.ones(3),), "params at the root: found a tuple, expected a dict"),
        (
            params,
            {"w": jnp.ones(3, "complex64")},
            r"params at \['w'\]: found dtype complex64",
        ),
    ]
    for updates, given, found in cases:
        with pytest.raises(AssertionError, match=found):
            average.update(updates, state, given)
    half = jax.tree.map(lambda m: m.astype(jnp.float16), state.ema.m)
    restored = state._replace(ema=state.ema._replace(m=half))
    with pytest.raises(AssertionError, match="found float16, expected float32 or wid"):
        average.update(params, restored, params)
