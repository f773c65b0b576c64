"""Every form inside every Optax wrapper: values, types, one trace, vmap, donation."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax import lax

import emaopt

pytestmark = pytest.mark.standard_promotion  # most wrappers promote implicitly

STEPS, BATCH, DECAY, EVERY = 6, 2, 0.75, 2
FORMS = {
    "ema": emaopt.ema,
    "params_ema": emaopt.params_ema,
    "compensated": lambda decay: emaopt.params_ema(decay, compensated=True),
    "overwrite": lambda decay: emaopt.overwrite(decay, every=EVERY),
}
ROWS = {}


class Row(NamedTuple):
    """A wrapper: how it is built around a form, and which steps and leaves it lets."""

    build: Callable  # from a factory of transformations, given the decay
    real: Callable = lambda step: True  # whether the form sees this step
    leaves: tuple = ("w", "b")  # the leaves that the form sees
    forms: tuple = ("ema", "params_ema", "overwrite")
    spoilt: int | None = None  # the step whose gradients are not finite


def row(name, **options):
    """Adds a wrapper to the table."""

    def add(build):
        ROWS[name] = Row(build, **options)

    return add


def sgd(form):
    return optax.chain(optax.sgd(1.0), form)


@row("chain", forms=tuple(FORMS))
def _(make):
    return sgd(make(DECAY))


@row("named_chain")
def _(make):
    return optax.named_chain(("sgd", optax.sgd(1.0)), ("average", make(DECAY)))


@row("chain in a chain")
def _(make):
    return optax.chain(optax.identity(), sgd(make(DECAY)))


@row("masked", leaves=("w",), forms=tuple(FORMS))
def _(make):
    return sgd(optax.masked(make(DECAY), {"w": True, "b": False}))


@row("nested masked", leaves=("w",))
def _(make):
    inner = optax.masked(make(DECAY), lambda tree: jax.tree.map(lambda _: True, tree))
    return sgd(optax.masked(inner, {"w": True, "b": False}))


@row("partition")
def _(make):
    both = {"slow": sgd(make(DECAY)), "fast": sgd(make(DECAY))}
    return optax.partition(both, {"w": "slow", "b": "fast"})


@row("partition, one part", leaves=("b",))
def _(make):
    both = {"slow": optax.sgd(1.0), "fast": sgd(make(DECAY))}
    return optax.partition(both, {"w": "slow", "b": "fast"})


@row("inject_hyperparams")
def _(make):
    return optax.inject_hyperparams(lambda decay: sgd(make(decay)))(decay=DECAY)


@row("inject_hyperparams, hyperparam_dtype")
def _(make):
    inject = optax.inject_hyperparams(
        lambda decay: sgd(make(decay)), hyperparam_dtype=jnp.float32
    )
    return inject(decay=lambda count: jnp.where(count < 0, 0.0, DECAY))


@row("inject_stateful_hyperparams")
def _(make):
    with pytest.warns(DeprecationWarning, match="inject_stateful_hyperparams"):
        inject = optax.inject_stateful_hyperparams(lambda decay: sgd(make(decay)))
    return inject(decay=DECAY)


@row("MultiSteps", real=lambda step: step % 2 == 1, forms=tuple(FORMS))
def _(make):
    return optax.MultiSteps(sgd(make(DECAY)), 2).gradient_transformation()


@row("apply_if_finite", real=lambda step: step != 2, spoilt=2)
def _(make):
    return optax.apply_if_finite(sgd(make(DECAY)), 5)


@row("conditionally_transform", real=lambda step: step % 3 != 0)
def _(make):
    return optax.conditionally_transform(sgd(make(DECAY)), lambda step: step % 3 != 0)


@row("conditionally_mask", real=lambda step: step % 3 != 0)
def _(make):
    return optax.conditionally_mask(sgd(make(DECAY)), lambda step: step % 3 != 0)


@row("flatten, beside")
def _(make):
    return optax.chain(optax.flatten(optax.sgd(1.0)), make(DECAY))


@row("schedule_free, beside", forms=("params_ema",))
def _(make):
    free = optax.contrib.schedule_free(optax.sgd(0.5), learning_rate=0.5)
    return optax.chain(free, make(DECAY))


@row("split_real_and_imaginary, beside")
def _(make):
    return optax.chain(
        optax.contrib.split_real_and_imaginary(optax.sgd(1.0)), make(DECAY)
    )


@row("sam", real=lambda step: step % 2 == 1, forms=("params_ema",))
def _(make):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(sgd(make(DECAY)), adversary, sync_period=2)


CELLS = [
    pytest.param(name, form, id=f"{name}-{form}")
    for name, contract in ROWS.items()
    for form in contract.forms
]


def gradients_of(contract):
    rng = np.random.default_rng(0)
    gradients = {
        "w": rng.normal(size=(BATCH, STEPS, 2)).astype(np.float32),
        "b": rng.normal(size=(BATCH, STEPS)).astype(np.float32),
    }
    if contract.spoilt is not None:
        gradients["b"][:, contract.spoilt] = np.nan
    return gradients


def scanned(optimizer):
    """Trains from zeros in one scan: parameters after each step, last average."""

    def train(gradients):
        params = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), gradients)

        def step(carry, gradient):
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), updates

        carry = params, optimizer.init(params)
        return lax.scan(step, carry, gradients)

    return jax.jit(jax.vmap(train))


@functools.cache
def given_to_the_form(name):
    """The updates of the wrapper around nothing."""
    optimizer = ROWS[name].build(lambda decay: optax.identity())
    return scanned(optimizer)(gradients_of(ROWS[name]))[1]


def expected(contract, form, updates):
    """Parameters and average of one leaf after the updates, in float64."""
    p = np.zeros_like(updates[0])
    m, w, seen = np.zeros_like(p), 0.0, 0
    for step, update in enumerate(updates):
        real = contract.real(step)
        if real:
            seen += 1
            w = DECAY * w + (1 - DECAY)
        if real and form == "ema":
            m = DECAY * m + (1 - DECAY) * update
            update = m / w
        p = p + update
        if real and form != "ema":
            m = DECAY * m + (1 - DECAY) * p
            if form == "overwrite" and seen % EVERY == 0:
                p = m / w
    return p, m / w


@pytest.mark.parametrize(("name", "form"), CELLS)
def test_values_in_a_scan_under_vmap(name, form):
    contract = ROWS[name]
    gradients = gradients_of(contract)
    plain = given_to_the_form(name)
    (params, state), updates = scanned(contract.build(FORMS[form]))(gradients)
    if form in ("params_ema", "compensated"):
        jax.tree.map(np.testing.assert_array_equal, updates, plain)
    if form == "ema" and name != "partition":
        found = jax.vmap(lambda s: emaopt.corrected(emaopt.find_state(s)))(state)
    elif form == "ema":
        found = {}
        for leaf, label in (("w", "slow"), ("b", "fast")):
            one = emaopt.find_state(state, which=label)
            found[leaf] = jax.vmap(emaopt.corrected)(one)[leaf]
    else:
        found = jax.vmap(emaopt.eval_params)(state, params)
    for leaf in ("w", "b"):
        for lane in range(BATCH):
            given = np.float64(plain[leaf][lane])
            seen = form if leaf in contract.leaves else "nothing"
            last, average = expected(contract, seen, given)
            # Each of the steps rounds a sum of at most this size.
            bound = 2 * STEPS * oracles.ULP * np.abs(given).sum(0).max()
            np.testing.assert_allclose(params[leaf][lane], last, atol=bound, rtol=0)
            if leaf in contract.leaves:
                np.testing.assert_allclose(
                    found[leaf][lane], average, atol=bound, rtol=0
                )
            elif form != "ema":
                np.testing.assert_array_equal(found[leaf][lane], params[leaf][lane])


def types(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.parametrize(("name", "form"), CELLS)
def test_types_are_stable_in_one_trace_with_a_donated_state(name, form):
    traces = []
    optimizer = ROWS[name].build(FORMS[form])

    def step(carry, gradient):
        traces.append(name)
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    carry = params, optimizer.init(params)
    if name == "sam":  # whose state holds the very buffers of the parameters
        carry = jax.tree.map(jnp.copy, carry)
    before = types(carry[1])
    donated = jax.jit(step, donate_argnums=0)
    gradient = {"w": jnp.ones(2), "b": jnp.ones(())}
    for _ in range(3):
        carry = donated(carry, gradient)
    assert types(carry[1]) == before
    assert len(traces) == 1


def average_in(optimizer, params=None):
    """`eval_params` of the state after one step."""
    if params is None:
        params = {"w": jnp.ones(2), "b": jnp.ones(())}
    state = optimizer.init(params)
    gradient = getattr(params, "fast", params)
    _, state = optimizer.update(gradient, state, params)
    return emaopt.eval_params(state, params)


OUTSIDE = r"belongs inside the chain that params_ema ends: chain\(wrapper\(...\), para"


@pytest.mark.parametrize("form", ["params_ema", "overwrite"])
def test_wrappers_that_change_the_structure_are_refused_with_advice(form):
    make = FORMS[form]
    with pytest.raises(AssertionError, match=OUTSIDE) as raised:
        average_in(optax.flatten(sgd(make(DECAY))))
    assert "params at the root: found a dict, expected a leaf" in str(raised.value)

    fast = optax.lookahead(sgd(make(DECAY)), 5, 0.5)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2)})
    with pytest.raises(AssertionError, match=OUTSIDE) as raised:
        average_in(fast, params)
    assert "inside optax.lookahead, where it sees the fast" in str(raised.value)
    # With the slow parameters alone it would fit, and be the wrong average.
    with pytest.raises(AssertionError, match=OUTSIDE):
        emaopt.eval_params(fast.init(params), params.slow)

    split = optax.contrib.split_real_and_imaginary(sgd(make(DECAY)))
    with pytest.raises(AssertionError, match=OUTSIDE) as raised:
        average_in(split, {"w": jnp.ones(2, jnp.complex64)})
    assert "params at ['w']: found a leaf, expected a Split" in str(raised.value)


def test_an_average_outside_of_lookahead_and_split():
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2)})
    outside = optax.chain(
        optax.lookahead(optax.sgd(0.5), 1, 0.5), FORMS["params_ema"](DECAY)
    )
    found = average_in(outside, params)
    np.testing.assert_allclose(found.slow["w"], 0.75)

    complex_params = {"w": jnp.full(2, 1 + 2j, jnp.complex64)}
    split = optax.contrib.split_real_and_imaginary(optax.sgd(0.5))
    found = average_in(optax.chain(split, FORMS["params_ema"](DECAY)), complex_params)
    np.testing.assert_allclose(found["w"], 0.5 + 1j, rtol=2 * oracles.ULP)
    inside = optax.contrib.split_real_and_imaginary(sgd(emaopt.ema(DECAY)))
    state = inside.init(complex_params)
    updates, state = inside.update(complex_params, state, complex_params)
    np.testing.assert_allclose(updates["w"], -1 - 2j, rtol=2 * oracles.ULP)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "decay", [DECAY, {"w": 0.5, "b": DECAY}], ids=["scalar", "tree"]
)
def test_map_params_finds_what_is_shaped_like_the_parameters(form, decay):
    optimizer = sgd(FORMS[form](decay))
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    names = {"w": "sharding of w", "b": "sharding of b"}
    mapped = optax.tree.map_params(
        optimizer,
        lambda _, name: name,
        optimizer.init(params),
        names,
        transform_non_params=lambda _: None,
    )
    state = emaopt.find_state(mapped)
    assert state.m == names
    assert state.residual.of_m == (names if form == "compensated" else None)
    assert jax.tree.leaves((state.weight, state.decay_power, state.count)) == []


def test_tree_get_and_set():
    optimizer = sgd(emaopt.params_ema(DECAY))
    state = optimizer.init({"w": jnp.zeros(2)})
    average = emaopt.find_state(state)
    assert optax.tree.get(state, "EmaState") is average
    assert optax.tree.get(state, "ema") is average
    assert optax.tree.get(state, "step") is state[-1].step
    ones = average._replace(m={"w": jnp.ones(2)})
    moved = optax.tree.set(state, ema=ones)
    assert emaopt.find_state(moved) is ones
