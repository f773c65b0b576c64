"""``python -m benchmarks [PART ...]``: prints a table of ratios."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys

# Fresh arrays above the allocator's threshold are mapped anew, page by page, at every
# call: it is raised for ours and the peers alike, before the allocator starts.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}
PARTS = ("sequences", "updates", "startup")


def main() -> None:
    """Runs the parts that are asked for, all by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument(
        "--system-allocator",
        action="store_true",
        help="leave the allocator's thresholds as they are",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {unknown.pop()!r}; known: {', '.join(PARTS)}")
    if not arguments.system_allocator and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        again = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | ALLOCATOR)

    from benchmarks import timing

    names = ("jax", "optax", "pandas", "polars", "numba", "scipy", "torch")
    python = platform.python_version()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {python}")
    print(", ".join(f"{name} {_version(name)}" for name in names))
    allocator = "system" if arguments.system_allocator else ALLOCATOR
    print(f"allocator: {allocator}\n")
    print(timing.HEADER, flush=True)
    rows = []
    for part in arguments.parts or PARTS:
        rows += importlib.import_module(f"benchmarks.{part}").main()
    missed = [row for row in rows if row.verdict == "not met"]
    judged = sum(row.target is not None for row in rows)
    print(f"\n{judged - len(missed)} of {judged} targets met")
    for row in missed:
        print(f"not met: {row.work}, {row.peer}: {row.ratio:.2f} of {row.target:.2f}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    main()
