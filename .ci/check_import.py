"""Checks the installed package where only its runtime dependencies are installed."""

import importlib.metadata
import importlib.util
import pathlib
import sys

import emaopt

assert importlib.util.find_spec("flax") is None, "flax is installed: nothing is checked"
heavy = {"flax", "matplotlib", "orbax", "pandas", "polars", "sklearn"} & set(
    sys.modules
)
assert not heavy, f"import emaopt has imported {sorted(heavy)}"
package = pathlib.Path(emaopt.__file__).parent
assert "site-packages" in package.parts, f"not the installed package: {package}"
assert (package / "py.typed").is_file(), "py.typed is not installed"
print(f"emaopt {importlib.metadata.version('emaopt')} works on its own")
