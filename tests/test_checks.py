"""Bad input: errors that name the leaf, what was found and what was expected."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import emaopt

KEY = jax.random.key(0)
F0 = np.zeros(2, jax.dtypes.float0)


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (KEY, "dtype key<fry>"),
        ("abc", "str 'abc'"),
        ("f4", "str 'f4'"),
        (np.array("f4"), "dtype <U2"),
        (np.array([None]), "dtype object"),
        (np.datetime64("2020-01-01"), "dtype datetime64"),
        (object(), "object <object"),
        (F0, r"dtype \[\('float0'"),
        (float, "type <class 'float'>"),
    ],
    ids=lambda case: str(case)[:12],
)
def test_init_names_the_leaf_that_is_no_number(leaf, found):
    message = (
        rf"the leaf at \['a'\]\[1\] is no number: found {found}.*, expected a real"
    )
    with pytest.raises(TypeError, match=message):
        emaopt.init({"a": (jnp.ones(2), leaf)})
    with pytest.raises(TypeError, match="the leaf at the root is no number: found"):
        emaopt.init(leaf)


def test_init_under_jit_names_the_leaf_that_is_no_number():
    with pytest.raises(TypeError, match=r"the leaf at \['k'\] is no number"):
        jax.jit(emaopt.init)({"k": KEY})


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (jnp.bfloat16, "must be float32 or wider, got bfloat16: an average held in it"),
        (np.float16, "must be float32 or wider, got float16"),
        (jnp.float8_e4m3fn, "must be float32 or wider, got float8_e4m3fn"),
        (np.int32, "must be a floating-point dtype, got int32"),
        (bool, "must be a floating-point dtype, got bool"),
        (np.float64, "accumulator_dtype=float64 needs jax_enable_x64, which is off"),
        (float, "accumulator_dtype=float64 needs jax_enable_x64, which is off"),
        (np.complex128, "floating-point dtype, got complex128"),
    ],
    ids=str,
)
def test_accumulator_dtypes_that_do_not_do(dtype, message):
    with pytest.raises(ValueError, match=message):
        emaopt.init(jnp.ones(2), accumulator_dtype=dtype)


def test_an_accumulator_narrower_than_a_leaf(x64):
    message = r"accumulator_dtype=float32 is narrower than the leaf at \['w'\]"
    for leaf in (np.ones(2), np.ones(2, np.complex128)):
        with pytest.raises(ValueError, match=message):
            emaopt.init({"w": jnp.asarray(leaf)}, accumulator_dtype=np.float32)


@pytest.mark.parametrize("name", ["compensated", "per_element", "warm_start"])
@pytest.mark.parametrize("value", [None, 1, "yes", np.array([True]), 0.0])
def test_flags_are_bools(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
        emaopt.init(jnp.ones(2), **{name: value})


def test_a_warm_start_needs_values():
    tree = {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    message = r"warm_start needs values, and the leaf at \['w'\] is abstract"
    with pytest.raises(ValueError, match=message):
        emaopt.init(tree, warm_start=True)


def test_a_decay_that_is_no_prefix_of_the_tree():
    tree = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for decay in ({"a": 0.5}, {"a": 0.5, "c": 0.5}, [0.5, 0.5], {"a": {"x": 0.5}}):
        with pytest.raises(ValueError, match="decay must be one value or a pytree pre"):
            emaopt.init(tree, decay=decay)


STRUCTURES = [
    ((jnp.ones(2), jnp.ones(2)), [jnp.ones(2)] * 2, "at the root: found a list, exp"),
    ({"0": jnp.ones(2)}, {0: jnp.ones(2)}, r"at \['0'\]: found nothing, expected a va"),
    ({"a": {"b": 1.0}}, {"a": {}}, r"at \['a'\]\['b'\]: found nothing, expected a val"),
    ({"a": {"b": 1.0}}, {}, r"at \['a'\]: found nothing, expected a value"),
    ({"a": 1.0}, {"a": 1.0, "b": 2.0}, r"at \['b'\]: found a value, expected nothing"),
    ({"a": {"b": 1.0}}, {"a": 1.0}, r"at \['a'\]: found a leaf, expected a dict"),
    ({"a": 1.0}, {"a": {"b": 1.0}}, r"at \['a'\]: found a dict, expected a leaf"),
    ({"a": 1.0}, {"a": None}, r"at \['a'\]: found a NoneType, expected a leaf"),
    ({"a": None}, {"a": 1.0}, r"at \['a'\]: found a leaf, expected a NoneType"),
    ([1.0, 2.0], [1.0], r"at \[1\]: found nothing, expected a value"),
    (1.0, optax.MaskedNode(), "at the root: found a MaskedNode, expected a leaf"),
]


@pytest.mark.parametrize(("old", "new", "message"), STRUCTURES, ids=range(11))
def test_another_structure_names_where_it_parts(old, new, message):
    state = emaopt.init(old)
    with pytest.raises(AssertionError, match="tree " + message):
        emaopt.update(state, new, 0.5)
    with pytest.raises(AssertionError, match="tree " + message):
        jax.jit(emaopt.update, static_argnums=2)(state, new, 0.5)
    with pytest.raises(AssertionError, match="like " + message):
        emaopt.corrected(state, new)


SHAPES = [
    ((2,), (3, 2)),
    ((1,), (3,)),
    ((3,), (1,)),
    ((), (1,)),
    ((1,), ()),
    ((0,), ()),
]


@pytest.mark.parametrize(("old", "new"), SHAPES, ids=str)
def test_shapes_never_broadcast(old, new):
    state = emaopt.init({"w": [jnp.zeros(old)]})
    tree = {"w": [jnp.zeros(new)]}

    def words(name):
        found = f"{name} at ['w'][0]: found shape {new}, expected {old}."
        return re.escape(found) + " Shapes never broadcast: initialise the state from"

    with pytest.raises(AssertionError, match=words("tree")):
        emaopt.update(state, tree, 0.5)
    with pytest.raises(AssertionError, match=words("tree")):
        jax.jit(emaopt.update, static_argnums=2)(state, tree, 0.5)
    with pytest.raises(AssertionError, match=words("like")):
        emaopt.corrected(state, tree)
    with pytest.raises(AssertionError, match=words("later.m")):
        emaopt.merge(state, emaopt.init(tree))
    # The state that was refused a value is as good as before.
    state = emaopt.update(state, {"w": [jnp.ones(old)]}, 0.5)
    np.testing.assert_array_equal(emaopt.corrected(state)["w"][0], np.ones(old))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            np.ones(2, np.complex64),
            "found dtype complex64, expected real numbers, since the average",
        ),
        (
            jax.random.split(KEY),
            r"found dtype key<fry>, expected a number, since the st",
        ),
        (np.array(["a", "b"]), "found dtype <U1, expected a number"),
        (F0, r"found dtype .*float0.*, expected a number"),
    ],
    ids=lambda case: str(case)[:10],
)
def test_dtypes_that_the_average_cannot_take(leaf, message):
    state = emaopt.init({"w": jnp.zeros(2)})
    with pytest.raises(AssertionError, match=r"tree at \['w'\]: " + message):
        emaopt.update(state, {"w": leaf}, 0.5)


def test_a_state_restored_in_float16():
    state = emaopt.init({"w": jnp.zeros(2)})
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = state._replace(m={"w": jnp.zeros(2, dtype)})
        message = r"the state at \['w'\]: found .*float16, expected float32 or wider"
        with pytest.raises(AssertionError, match=message):
            emaopt.update(narrow, {"w": jnp.zeros(2, dtype)}, 0.5)


def test_wider_than_the_accumulator(x64):
    state = emaopt.init({"w": jnp.zeros(2, jnp.float32)})
    message = r"tree at \['w'\]: found dtype float64, expected no wider than float32"
    with pytest.raises(AssertionError, match=message):
        emaopt.update(state, {"w": jnp.zeros(2)}, 0.5)
    with pytest.raises(AssertionError, match=message):
        emaopt.update(state, {"w": np.zeros(2)}, 0.5)


def test_real_dtypes_for_a_complex_average():
    state = emaopt.init(jnp.zeros(2, jnp.complex64))
    with pytest.raises(AssertionError, match=r"like at the root: .*expected a complex"):
        emaopt.corrected(state, jnp.zeros(2))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            np.array([True, False]),
            ValueError,
            r"finer than the state: found shape \(2,",
        ),
        (np.array([True]), ValueError, r"observed is finer than the state"),
        ({"w": True}, ValueError, "observed is finer than the state: found structure"),
        (1, TypeError, "observed must be bool, got int 1"),
        (None, (TypeError, ValueError), "observed"),
        (np.float32(1), TypeError, "observed must be bool, got dtype float32"),
    ],
    ids=lambda case: str(case)[:10],
)
def test_masks_that_the_state_cannot_take(mask, error, message):
    state = emaopt.init({"w": jnp.zeros(2)})
    with pytest.raises(error, match=message):
        emaopt.update(state, {"w": jnp.zeros(2)}, 0.5, observed=mask)


def test_masks_that_do_not_fit_the_elements():
    state = emaopt.init({"w": jnp.zeros((3, 2))}, per_element=True)
    for shape in ((3,), (4, 2), (1, 3, 2)):
        with pytest.raises(
            ValueError, match=r"observed .*found shape .*expected \(3, 2"
        ):
            emaopt.update(
                state, {"w": jnp.zeros((3, 2))}, 0.5, observed=np.ones(shape, bool)
            )


def test_decays_finer_than_the_state():
    tree = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    state = emaopt.init(tree)
    with pytest.raises(ValueError, match="decay is finer than the state: found struct"):
        emaopt.update(state, tree, {"a": 0.5, "b": 0.5})
    for shape in ((2,), (1,)):
        with pytest.raises(
            ValueError, match=rf"decay has shape \({shape[0]},\), expec"
        ):
            emaopt.update(state, tree, np.full(shape, 0.5))
        with pytest.raises(
            ValueError, match=rf"decay has shape \({shape[0]},\), expec"
        ):
            jax.jit(emaopt.update)(state, tree, np.full(shape, 0.5, np.float32))


@pytest.mark.parametrize("value", ["forget", None, True, "Hold", ["hold"]])
def test_unobserved_is_hold_or_decay(value):
    with pytest.raises(
        ValueError, match="unobserved must be one of 'hold', 'decay', g"
    ):
        emaopt.update(emaopt.init(1.0), 1.0, 0.5, unobserved=value)


def test_states_that_do_not_merge():
    tree = {"w": jnp.zeros(2)}
    state = emaopt.init(tree)
    others = {
        "later": emaopt.init(tree, decay={"w": 0.5}),
        "later.m": emaopt.init({"v": jnp.zeros(2)}),
        "per": emaopt.init(tree, per_element=True),
    }
    with pytest.raises(
        AssertionError, match=r"later at \.decay_power: found a dict, expected"
    ):
        emaopt.merge(state, others["later"])
    with pytest.raises(AssertionError, match=r"later\.m at \['w'\]: found nothing"):
        emaopt.merge(state, others["later.m"])
    with pytest.raises(AssertionError, match=r"later at \.decay_power: found a dict"):
        emaopt.merge(state, others["per"])
    one = emaopt.init(jnp.zeros(3))
    each = emaopt.init(jnp.zeros(3), per_element=True)
    for pair in ((one, each), (each, one)):
        with pytest.raises(
            AssertionError, match=r"later at \.decay_power: found shape"
        ):
            emaopt.merge(*pair)
    two = emaopt.init(tree, compensated=True)
    with pytest.raises(
        AssertionError, match=r"later at \.residual\.of_m: found a dict"
    ):
        emaopt.merge(state, two)
    with pytest.raises(
        AssertionError, match=r"later at \.residual\.of_m: found a NoneTyp"
    ):
        emaopt.merge(two, state)


def test_states_of_other_dtypes_do_not_merge(x64):
    states = [emaopt.init(jnp.zeros(2, dtype)) for dtype in (np.float32, np.float64)]
    with pytest.raises(AssertionError, match=r"later.* found dtype float64, expected"):
        emaopt.merge(*states)
    with pytest.raises(
        AssertionError, match=r"later at \.m: found dtype float32, expe"
    ):
        emaopt.merge(*states[::-1])


@pytest.mark.parametrize("bad", [1.0, -0.5, np.nan])
def test_traced_decays_out_of_range_are_seen_by_checkify_alone(bad):
    state = emaopt.init(jnp.ones(2))

    def step(decay):
        return emaopt.update(state, jnp.ones(2), decay).m

    jax.jit(step)(jnp.float32(bad))  # silent
    checked = checkify.checkify(step, errors=checkify.user_checks)
    error, _ = jax.jit(checked)(jnp.float32(bad))
    with pytest.raises(
        checkify.JaxRuntimeError, match=r"decay must be in \[0, 1\), got"
    ):
        error.throw()
    error, _ = jax.jit(checked)(jnp.float32(0.5))
    error.throw()

    def scheduled(decay):
        return emaopt.update(state, jnp.ones(2), lambda count: decay).m

    checked = checkify.checkify(scheduled, errors=checkify.user_checks)
    error, _ = jax.jit(checked)(jnp.float32(bad))
    if bad == 1:
        error.throw()
    else:
        with pytest.raises(checkify.JaxRuntimeError, match=r"must be in \[0, 1\], got"):
            error.throw()


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (
            lambda: emaopt.ema(0.9).update(
                jnp.ones(2), optax.ema(0.9).init(jnp.ones(2))
            ),
            r"state: found optax\..*EmaState, expected emaopt",
        ),
        (
            lambda: emaopt.params_ema(0.9).update(
                jnp.ones(2), emaopt.init(jnp.ones(2)), jnp.ones(2)
            ),
            r"state: found emaopt.*\.EmaState, expected emaopt.*ParamsEmaState",
        ),
        (
            lambda: emaopt.corrected(emaopt.params_ema(0.9).init(jnp.ones(2))),
            r"state: found emaopt.*ParamsEmaState, expected emaopt.*\.EmaState",
        ),
    ],
)
def test_states_of_another_type(call, found):
    with pytest.raises(AssertionError, match=found):
        call()


def test_a_state_made_under_vmap_is_not_read_outside():
    state = jax.vmap(emaopt.init)({"w": jnp.ones((3, 3))})
    with pytest.raises(
        AssertionError,
        match=r"state.weight at \['w'\]: found shape \(3,\), expected \(\) or \(3, 3\)",
    ):
        emaopt.corrected(state)
    assert jax.vmap(emaopt.corrected)(state)["w"].shape == (3, 3)


def test_a_complex_accumulator_is_refused():
    with pytest.raises(ValueError, match="floating-point dtype, got complex64"):
        emaopt.ema(0.9, accumulator_dtype=jnp.complex64)
