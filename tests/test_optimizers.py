"""Averages beside and inside Optax's optimizers, and of what a loop measures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import emaopt

pytestmark = pytest.mark.standard_promotion  # the optimizers promote implicitly


def rosenbrock(params):
    x = jnp.concatenate([params["w"].ravel(), params["b"]])
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lbfgs": lambda: optax.lbfgs(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_updates_of_an_optimizer_are_untouched(name):
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    # Compiled alone, so that both runs below share its every rounding.
    update = jax.jit(optimizer.update, static_argnames="value_fn")
    alone = optax.GradientTransformationExtraArgs(optimizer.init, update)

    def train(optimizer):
        params = {"w": jnp.full((2, 2), 0.3), "b": jnp.full(2, -0.2)}
        state = optimizer.init(params)
        history, emitted = [], []
        for _ in range(4):
            value, gradient = value_and_grad(params)
            updates, state = optimizer.update(
                gradient, state, params, value=value, grad=gradient, value_fn=rosenbrock
            )
            params = optax.apply_updates(params, updates)
            history.append(params)
            emitted.append(updates)
        return history, emitted, state

    value_and_grad = jax.jit(jax.value_and_grad(rosenbrock))
    history, updates, state = train(alone)
    *with_average, chained = train(optax.chain(alone, emaopt.params_ema(0.75)))
    jax.tree.map(
        np.testing.assert_array_equal,
        (history, updates, state),
        (*with_average, chained[0]),
    )
    average = emaopt.eval_params(chained, history[-1])
    for leaf in ("w", "b"):
        values = np.stack([params[leaf] for params in history])
        reference = oracles.ema(values, 0.75).corrected[-1]
        scale = np.abs(values).max()
        np.testing.assert_allclose(
            average[leaf], reference, atol=4 * oracles.ULP * scale
        )


def test_metrics_in_two_lines_and_in_a_chain_with_monitor(rng):
    values = rng.normal(size=(8, 3)).astype(np.float32)
    norms = np.sqrt((np.float64(values) ** 2).sum(1))
    reference = oracles.ema(norms, 0.9).corrected[-1]

    state = emaopt.init({"loss": jnp.float32(0), "norm": jnp.float32(0)})
    for value in values:
        metrics = {"loss": np.float64(value[0]), "norm": optax.tree.norm(value)}
        state = emaopt.update(state, metrics, 0.9)
    smooth = emaopt.corrected(state)
    np.testing.assert_allclose(smooth["norm"], reference, rtol=8 * oracles.ULP)

    norm = emaopt.ema(0.9)
    measure = optax.chain(
        optax.stateless(lambda updates, _: optax.tree.norm(updates)),
        norm._replace(init=lambda params: norm.init(optax.tree.norm(params))),
    )
    optimizer = optax.chain(optax.monitor({"norm": measure}), optax.sgd(0.1))
    state = optimizer.init(jnp.zeros(3))
    for value in values:
        _, state = optimizer.update(value, state)
    found = optax.tree.get(state, "norm")
    np.testing.assert_allclose(found, reference, rtol=8 * oracles.ULP)
    np.testing.assert_allclose(
        emaopt.corrected(emaopt.find_state(state)), reference, rtol=8 * oracles.ULP
    )


def steps(optimizer, gradients):
    """The last parameters and state, from 0."""
    params = jnp.float32(0)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_inside_wrappers_only_real_steps_are_averaged():
    sgd = optax.chain(optax.sgd(1.0), emaopt.params_ema(0.5))
    for optimizer, gradients in (
        (optax.MultiSteps(sgd, 4).gradient_transformation(), [-1] * 8),
        (optax.apply_if_finite(sgd, 5), [-1, np.nan, -1]),
    ):
        params, state = steps(optimizer, gradients)
        average = emaopt.eval_params(state, params)
        np.testing.assert_allclose(average, 5 / 3, rtol=2 * oracles.ULP)
        assert emaopt.find_state(state).decay_power == 0.25


def test_bfloat16_parameters_inside_wrappers_keep_their_types():
    average = optax.chain(optax.sgd(0.5), emaopt.params_ema(0.9))
    for optimizer in (
        optax.MultiSteps(average, 2).gradient_transformation(),
        optax.apply_if_finite(average, 5),
        optax.masked(average, {"w": True}),
    ):
        params = {"w": jnp.ones(3, jnp.bfloat16)}

        def step(carry, gradient, optimizer=optimizer):
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), updates

        gradients = {"w": jnp.zeros((4, 3), jnp.bfloat16)}
        (params, state), _ = jax.lax.scan(
            step, (params, optimizer.init(params)), gradients
        )
        found = emaopt.eval_params(state, params)["w"]
        assert found.dtype == params["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, 1)


def test_outside_of_wrappers_every_call_is_averaged():
    every_other = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    params, state = steps(
        optax.chain(every_other, emaopt.params_ema(0.5)), [-1, -1, -1, -1]
    )
    expected = oracles.ema([0, 1, 1, 2], 0.5).corrected[-1]
    average = emaopt.eval_params(state, params)
    np.testing.assert_allclose(average, expected, rtol=2 * oracles.ULP)
    assert emaopt.find_state(state).count == 4


def test_inside_sam_the_average_never_sees_parameters_on_loan():
    def run(inside):
        link = emaopt.params_ema(0.5)
        outer = optax.chain(optax.sgd(0.1), link) if inside else optax.sgd(0.1)
        adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
        optimizer = optax.contrib.sam(outer, adversary, sync_period=2)
        if not inside:
            optimizer = optax.chain(optimizer, link)
        return steps(optimizer, [1, 1, 1, 1])

    # The real parameters are −0.1 and −0.2; on loan they are at +0.5 and +0.4.
    params, state = run(inside=True)
    average = emaopt.eval_params(state, params)
    expected = oracles.ema([-0.1, -0.2], 0.5).corrected[-1]
    np.testing.assert_allclose(average, expected, rtol=8 * oracles.ULP)
    params, state = run(inside=False)
    assert emaopt.find_state(state).count == 4
    assert emaopt.eval_params(state, params) > 0
