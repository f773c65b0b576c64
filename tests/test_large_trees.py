"""Trees of thousands of leaves: what is traced, and how long that takes."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ULP

import emaopt


def tree(leaves, shapes=((4, 16),)):
    """Leaf i is filled with i."""
    return {
        f"{i}": np.full(shapes[i % len(shapes)], i, np.float32) for i in range(leaves)
    }


def traced(average, params):
    """A whole step: made, updated, read."""

    def step(params):
        state = average.init(params)
        updates, state = average.update(params, state, params)
        return emaopt.eval_params(state, params), updates, state

    return jax.make_jaxpr(step)(params).jaxpr


OPTIONS = [{}, {"compensated": True}, {"every": 3, "skip_nonfinite": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("decay", [0.999, lambda count: 1 - 1 / (2 + count)])
def test_the_program_grows_by_the_same_with_every_leaf(decay, options):
    average = emaopt.params_ema(decay, **options)
    sizes = [str(traced(average, tree(n))).count(" = ") for n in (20, 40, 60)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1]


@pytest.mark.slow
def test_ten_thousand_leaves_trace_in_linear_time():
    average = emaopt.params_ema(0.999, compensated=True)
    small, large = tree(1_000), tree(10_000)

    def seconds(params):
        start = time.perf_counter()
        traced(average, params)
        return time.perf_counter() - start

    # Ten times if linear; a hundred times if each leaf looks at all the others.
    assert seconds(large) < 40 * min(seconds(small), seconds(small))


@pytest.mark.slow
def test_a_thousand_leaves_of_many_shapes_are_not_mixed_up():
    params = tree(1_000, shapes=((), (3,), (2, 5), (0,), (1, 1, 2), (64, 16)))
    average = emaopt.params_ema(0.75)

    @jax.jit
    def step(params, state):
        updates, state = average.update(params, state, params)
        return updates, state, emaopt.eval_params(state, params)

    state = average.init(params)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    for values in (params, doubled):
        updates, state, found = step(values, state)
        jax.tree.map(np.testing.assert_array_equal, updates, values)
    # The averages of 2·i and 4·i, with weights 0.75·0.25 and 0.25.
    for i, (name, leaf) in enumerate(params.items()):
        assert found[name].shape == leaf.shape
        expected = i * (2 * 0.75 + 4) / 1.75
        np.testing.assert_allclose(found[name], expected, rtol=2 * ULP)
    assert step._cache_size() == 1
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert jnp.shape(emaopt.find_state(state).weight) == ()
