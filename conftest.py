"""What every test and doctest needs before JAX is imported."""

import importlib.metadata
import os
import pathlib

_DEVICES = "--xla_force_host_platform_device_count"

# Eight CPU devices, so that sharding is tested everywhere. Whatever the user has
# set in the environment is kept.
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests compile what another has compiled, in this run or the last.
_CACHE = pathlib.Path(__file__).parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("MPLBACKEND", "agg")


def pytest_report_header():
    names = ("jax", "jaxlib", "optax", "chex", "flax", "numpy")
    versions = (f"{name}-{importlib.metadata.version(name)}" for name in names)
    return "versions: " + ", ".join(versions)
