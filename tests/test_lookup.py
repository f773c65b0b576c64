"""`eval_params`, `find_state`: whose average, in any nesting; what errors say."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import emaopt

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.float32(4)}


def halve(optimizer, params=PARAMS, steps=2):
    """The state and the parameters after steps that each halve the parameters."""
    state = optimizer.init(params)
    for _ in range(steps):
        updates = jax.tree.map(lambda p: -0.5 * p, params)
        updates, state = optimizer.update(updates, state, params)
        params = optax.apply_updates(params, updates)
    return state, params


def average(decay, steps=2):
    """The average of 1/2, 1/4, ..., in float64."""
    return oracles.ema(0.5 ** np.arange(1, steps + 1), decay).corrected[-1]


def several():
    return optax.named_chain(
        ("fast", emaopt.params_ema(0.5)),
        ("gradients", optax.sgd(1.0)),
        ("slow", optax.chain(optax.identity(), emaopt.params_ema(0.75))),
    )


def check(found, scales):
    """Compares with the initial parameters, scaled."""
    for name, scale in scales.items():
        np.testing.assert_allclose(
            found[name], scale * PARAMS[name], rtol=4 * oracles.ULP
        )


def test_which_chooses_by_index_or_by_a_name_on_the_way():
    optimizer = optax.chain(
        optax.named_chain(
            ("fast", emaopt.params_ema(0.5)),
            ("smooth", emaopt.ema(0.0)),
            ("slow", optax.chain(optax.identity(), emaopt.params_ema(0.75))),
        ),
        optax.identity(),
    )
    state, params = halve(optimizer)
    for which in (0, "fast"):
        found = emaopt.eval_params(state, params, which=which)
        check(found, {"w": average(0.5), "b": average(0.5)})
    for which in (1, "slow"):
        found = emaopt.eval_params(state, params, which=which)
        check(found, {"w": average(0.75), "b": average(0.75)})
    # find_state counts the averages of updates too.
    assert emaopt.find_state(state, 2) is emaopt.find_state(state, "slow")
    assert emaopt.find_state(state, "smooth").m["b"] == -1
    with pytest.raises(LookupError, match="which='smooth' is none of the averages fou"):
        emaopt.eval_params(state, params, which="smooth")


def parts():
    return optax.partition(
        {
            "slow": optax.chain(optax.identity(), emaopt.params_ema(0.75)),
            "fast": optax.chain(optax.identity(), emaopt.params_ema(0.5)),
        },
        {"w": "slow", "b": "fast"},
    )


def test_averages_over_disjoint_leaves_are_combined():
    state, params = halve(parts())
    for evaluate in (emaopt.eval_params, jax.jit(emaopt.eval_params)):
        check(evaluate(state, params), {"w": average(0.75), "b": average(0.5)})
    # One label alone: the other leaves are those of the parameters.
    found = emaopt.eval_params(state, params, which="slow")
    check(found, {"w": average(0.75), "b": 0.25})


def test_disjoint_masks_are_combined_and_overlapping_ones_are_not():
    def chained(*masks):
        links = [optax.masked(emaopt.params_ema(0.5), mask) for mask in masks]
        return halve(optax.chain(*links))

    state, params = chained({"w": True, "b": False}, {"w": False, "b": True})
    check(emaopt.eval_params(state, params), {"w": average(0.5), "b": average(0.5)})
    state, params = chained({"w": True, "b": False}, {"w": True, "b": True})
    with pytest.raises(LookupError, match="found 2 averages of the same leaves"):
        emaopt.eval_params(state, params)
    found = emaopt.eval_params(state, params, which=0)
    check(found, {"w": average(0.5), "b": 0.25})


def test_deep_nesting():
    inner = optax.chain(optax.scale(-1.0), emaopt.params_ema(0.5))
    optimizer = optax.apply_if_finite(
        optax.MultiSteps(
            optax.inject_hyperparams(
                lambda rate: optax.chain(optax.scale(rate), inner)
            )(rate=-1.0),
            1,
        ).gradient_transformation(),
        3,
    )
    with jax.numpy_dtype_promotion("standard"):
        state, params = halve(optimizer)
    check(emaopt.eval_params(state, params), {"w": average(0.5), "b": average(0.5)})
    # Inside other containers, such as a training state.
    check(emaopt.eval_params([{"opt": state}], params), {"w": average(0.5)})


def test_an_average_of_updates_is_none_of_parameters():
    state, params = halve(optax.chain(emaopt.ema(0.0), optax.scale(1.0)))
    with pytest.raises(LookupError) as raised:
        emaopt.eval_params(state, params)
    assert str(raised.value) == (
        "found no average of parameters (params_ema) in the optimizer's state; "
        "averages there:\n  ema at [0], 2 leaves\n"
        "Put emaopt.params_ema(decay) last in the optax.chain."
    )


def test_nothing_found():
    for state in (optax.adam(0.1).init(PARAMS), (), None):
        with pytest.raises(LookupError, match="averages there: none of any kind"):
            emaopt.eval_params(state, PARAMS)
        with pytest.raises(
            LookupError, match="found no average in the optimizer's sta"
        ):
            emaopt.find_state(state)


def test_arguments_in_the_wrong_order():
    state, params = halve(optax.chain(optax.sgd(0.1), emaopt.params_ema(0.5)))
    with pytest.raises(LookupError) as raised:
        emaopt.eval_params(params, state)
    assert str(raised.value).endswith(
        "There is one in params: call eval_params(opt_state, params)."
    )
    with pytest.raises(LookupError, match=r"or emaopt.ema\(decay\) anywhere in it"):
        emaopt.find_state(params)


def test_errors_list_what_is_where():
    state, params = halve(several())
    listed = (
        "\n  0: params_ema at ['fast'], 2 leaves"
        "\n  1: params_ema at ['slow'][1], 2 leaves"
    )
    ambiguous = (
        f"found 2 averages of the same leaves:{listed}\n"
        "Choose one with which=, by its index or by a name on its path."
    )
    for find in (
        lambda: emaopt.eval_params(state, params),
        lambda: emaopt.find_state(state),
    ):
        with pytest.raises(LookupError) as raised:
            find()
        assert str(raised.value) == ambiguous
    for which in ("medium", 2, -1, True, 0.0):
        with pytest.raises(LookupError) as raised:
            emaopt.eval_params(state, params, which=which)
        missing = f"which={which!r} is none of the averages found:{listed}"
        assert str(raised.value) == missing


def test_an_index_is_the_same_before_and_after_a_name():
    pair = optax.chain(emaopt.params_ema(0.5), emaopt.params_ema(0.75))
    state, params = halve(
        optax.named_chain(("first", emaopt.params_ema(0.0)), ("pair", pair))
    )
    with pytest.raises(LookupError, match=re.escape("2: params_ema at ['pair'][1]")):
        emaopt.eval_params(state, params, which="pair")
    check(emaopt.eval_params(state, params, which=2), {"w": average(0.75)})


def test_other_parameters_are_refused():
    state, _ = halve(emaopt.params_ema(0.5))
    cases = [
        ({"w": jnp.ones(2)}, r"params at \['b'\]: found nothing, expected a value"),
        (
            {"w": jnp.ones(3), "b": jnp.float32(1)},
            r"params at \['w'\]: found shape \(3,",
        ),
        (
            PARAMS | {"c": jnp.ones(1)},
            r"params at \['c'\]: found a value, expected not",
        ),
    ]
    for params, found in cases:
        with pytest.raises(AssertionError, match=found):
            emaopt.eval_params(state, params)


def test_dtypes_are_those_of_the_parameters_given():
    state, params = halve(emaopt.params_ema(0.5))
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    found = emaopt.eval_params(state, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("bfloat16")}


def test_evaluation_changes_nothing():
    state, params = halve(emaopt.params_ema(0.5))
    before = jax.tree.map(np.array, (state, params))
    average = emaopt.eval_params(state, params)
    with pytest.raises(AssertionError, match="found shape"):
        emaopt.eval_params(state, {"w": jnp.ones(3), "b": jnp.ones(())})
    jax.tree.map(lambda leaf: leaf.delete(), average)
    jax.tree.map(np.testing.assert_array_equal, (state, params), before)


def test_abstract_evaluation():
    state = emaopt.params_ema(0.5).init(PARAMS)
    found = jax.eval_shape(emaopt.eval_params, state, PARAMS)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(
        lambda leaf: leaf.dtype, PARAMS
    )
