"""Settings and fixtures of the tests (devices are set in the root's conftest.py)."""

import zlib

import hypothesis
import jax
import numpy as np
import pytest

# Examples are the same in every run, and compiling takes longer than the
# default deadline.
hypothesis.settings.register_profile(
    "emaopt", derandomize=True, database=None, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("emaopt")


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """Makes implicit promotions of dtypes and ranks errors.

    Optax itself promotes implicitly (`optax.adam`, `optax.ema`): a test that runs
    it is marked `standard_promotion`, and then dtypes are promoted as by default.
    """
    relaxed = request.node.get_closest_marker("standard_promotion")
    dtypes = "standard" if relaxed else "strict"
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def x64():
    """Enables 64-bit types for the duration of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng(request):
    """A NumPy generator with a seed of its own for each test, the same in every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
