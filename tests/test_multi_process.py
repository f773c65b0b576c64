"""Two processes with `jax.distributed`: `examples/multi_process.py`, and one dying."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import emaopt

SCRIPT = Path(__file__).parents[1] / "examples" / "multi_process.py"
LIMIT = 300  # seconds; on an idle machine the whole takes 15


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("multi_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def complete(directory):
    """The steps of the checkpoints that are complete: Orbax renames them last."""
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    out = run("--steps=6", "--every=3", f"--directory={tmp_path}")
    for process in (0, 1):
        assert f"process {process}: 4 of 8 devices, step 6" in out
    for what in ("parameters and state", "averaged parameters"):
        assert f"{what}, two processes against one, step 6: the same bits" in out
    assert "onto {'data': 1, 'model': 8}, each device holds (32, 2) of (32, 16)" in out
    assert sorted(complete(tmp_path)) == [3, 6]


@pytest.mark.slow
def test_a_process_that_dies_leaves_the_last_checkpoint(script, tmp_path):
    end = time.monotonic() + LIMIT
    with script.workers(tmp_path, steps=10**6, every=2) as running:
        while not any(step >= 4 for step in complete(tmp_path)):
            assert time.monotonic() < end
            assert [process.poll() for process in running] == [None, None]
            time.sleep(0.02)
        running[1].send_signal(signal.SIGKILL)
        with pytest.raises(SystemExit, match="the last checkpoint can be resumed"):
            script.finish(running, LIMIT)
    assert None not in [process.poll() for process in running]
    last = max(complete(tmp_path))
    more = f"--steps={last + 2}", "--every=2", f"--directory={tmp_path}"
    out = run(*more)
    assert f"state, two processes against one, step {last + 2}: the same bits" in out


def test_a_process_that_never_ends_is_not_waited_for(script):
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as p,
        pytest.raises(SystemExit, match=r"not done after 0.2 s: \[None\]"),
    ):
        script.finish([p], 0.2)


@pytest.mark.parametrize("steps", ["0", "7"])
def test_refuses_steps_without_a_checkpoint_at_the_end(script, steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main([f"--steps={steps}", "--every=5"])
    assert "--steps: expected a positive multiple of --every" in capsys.readouterr().err


@pytest.mark.standard_promotion
def test_the_model_of_the_example_is_trained_and_its_average_follows(script):
    mesh = script.grid(2, 4)
    history = []
    params, state = script.train(
        mesh, 3, after=lambda _, trained: history.append(jax.device_get(trained[0]))
    )
    average = script.averaged((params, state))["kernel"]
    weights = jnp.array([0.81, 0.9, 1.0]) / 2.71
    expected = sum(w * p["kernel"] for w, p in zip(weights, history, strict=True))
    assert jnp.max(jnp.abs(average - expected)) < 1e-6
    assert average.sharding.is_equivalent_to(params["kernel"].sharding, 2)
    assert emaopt.find_state(state).m["bias"].addressable_shards[0].data.shape == (2,)
