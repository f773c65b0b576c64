"""Trains one model in two processes, and compares its average with that of one.

Two processes start on this machine, meet over its loopback interface and drive four
CPU devices each, as the hosts of a cluster drive their accelerators. Parameters, their
average and the batches are spread over all eight devices. Both processes write their
part of every checkpoint.

    python examples/multi_process.py --steps 20 --every 5

then restores the last checkpoint in one process, onto a mesh of another shape, trains
the same model in that process alone, and compares the two bit for bit. To resume what
an interrupted run has left in a directory, name it with --directory.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import emaopt

PROCESSES = 2
DEVICES = "--xla_force_host_platform_device_count={}"
SPECS = {"kernel": P("data", "model"), "bias": P(("data", "model"))}
OPTIMIZER = optax.chain(optax.adam(0.01), emaopt.params_ema(0.9))


def grid(data, model):
    return jax.make_mesh((data, model), ("data", "model"), (AxisType.Auto,) * 2)


def create():
    kernel = jax.random.normal(jax.random.key(0), (32, 16), jnp.float32)
    params = {"kernel": kernel, "bias": jnp.zeros(16, jnp.float32)}
    return params, OPTIMIZER.init(params)


def shardings(mesh):
    """Where parameters and state belong: the average where its parameter is."""
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params, state = jax.eval_shape(create)
    of_state = optax.tree.map_params(
        OPTIMIZER,
        lambda _, place: place,
        state,
        places,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    return params, state, (places, of_state)


def batch(step, mesh):
    """Inputs and targets of one step; each device makes its own part."""
    x = np.random.default_rng(step).normal(size=(16, 32)).astype(np.float32)
    place = NamedSharding(mesh, P("data"))
    make = partial(jax.make_array_from_callback, sharding=place)
    return make(x.shape, data_callback=lambda part: x[part])


def train(mesh, steps, start=0, begin=None, after=lambda step, trained: None):
    """The parameters and the state after ``steps``; ``after`` is called with each."""
    places = shardings(mesh)[2]

    def loss(params, x):
        guess = jnp.tanh(x @ params["kernel"] + params["bias"][None])
        # What there is to learn: whether two neighbouring inputs have one sign.
        return jnp.mean((guess - jnp.sign(x[:, ::2] * x[:, 1::2])) ** 2)

    # With two shards of a batch each gradient is the sum of two terms: it does not
    # depend on the order in which a cluster adds them.
    @partial(jax.jit, out_shardings=places, donate_argnums=(0, 1))
    def train_step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    trained = begin or jax.jit(create, out_shardings=places)()
    for step in range(start + 1, steps + 1):
        trained = train_step(*trained, batch(step, mesh))
        after(step, trained)
    return trained


def checkpoints(directory):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(Path(directory).resolve(), options=options)


def restore(directory, mesh):
    """The step of the last complete checkpoint, and what is in it, on ``mesh``."""
    params, state, places = shardings(mesh)
    target = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (params, state),
        places,
    )
    with checkpoints(directory) as manager:
        step = manager.latest_step()
        restored = manager.restore(step, args=ocp.args.StandardRestore(target))
    return step, tuple(restored)


def work(process, port, directory, steps, every):
    """What each of the two processes does."""
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    mesh = grid(data=PROCESSES, model=4)
    with checkpoints(directory) as manager:

        def save(step, trained):
            if step % every == 0:
                manager.save(step, args=ocp.args.StandardSave(trained))

        begun = manager.latest_step()
        start, begin = restore(directory, mesh) if begun else (0, None)
        train(mesh, steps, start, begin, after=save)
    held = jax.local_device_count()
    print(f"process {process}: {held} of {jax.device_count()} devices, step {steps}")
    jax.distributed.shutdown()


@contextlib.contextmanager
def workers(directory, steps, every):
    """The two processes, which do not outlive the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, f"--directory={directory}", f"--port={port}"]
    command += [f"--steps={steps}", f"--every={every}"]
    running = [subprocess.Popen([*command, f"--process={i}"]) for i in range(PROCESSES)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def finish(running, timeout):
    """Waits for all of them; ends with the first that fails."""
    end = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in running]):
        if any(codes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    if any(codes):
        sys.exit(f"a process ended with {codes}; the last checkpoint can be resumed")
    if None in codes:
        sys.exit(f"not done after {timeout} s: {codes}")


def same(a, b):
    """Whether all numbers in two trees are the same, to the last bit."""
    a, b = jax.device_get((a, b))
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps for a checkpoint")
    parser.add_argument("--directory", type=Path, help="of the checkpoints")
    parser.add_argument("--timeout", type=float, default=300, help="in seconds")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 1 or args.every < 1 or args.steps % args.every:
        parser.error("--steps: expected a positive multiple of --every")
    # JAX reads them when it is first asked for devices; of two equal flags, the last.
    count = 8 if args.process is None else 8 // PROCESSES
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES.format(count)}"
    os.environ["XLA_FLAGS"] = flags.strip()
    jax.config.update("jax_platforms", "cpu")
    if args.process is not None:
        work(args.process, args.port, args.directory, args.steps, args.every)
        return

    with contextlib.ExitStack() as stack:
        directory = args.directory
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        running = stack.enter_context(workers(directory, args.steps, args.every))
        finish(running, args.timeout)
        other = grid(data=1, model=8)
        step, restored = restore(directory, other)
    alone = train(grid(data=PROCESSES, model=4), args.steps)
    for name, found, expected in (
        ("parameters and state", restored, alone),
        ("averaged parameters", averaged(restored), averaged(alone)),
    ):
        verdict = "the same bits" if same(found, expected) else "DIFFERENT"
        print(f"{name}, two processes against one, step {step}: {verdict}")
    kernel = emaopt.find_state(restored[1]).m["kernel"]
    print(f"restored onto {dict(other.shape)}, each device holds", end=" ")
    print(kernel.addressable_shards[0].data.shape, "of", kernel.shape)
    if not same(restored, alone):
        sys.exit(1)


@jax.jit
def averaged(trained):
    params, state = trained
    return emaopt.eval_params(state, params)


if __name__ == "__main__":
    main()
