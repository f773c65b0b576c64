"""The notebooks of examples/: committed without outputs, and running to their end."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook, kind):
    found = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in found if output.output_type == kind]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_there_are_the_four_notebooks():
    stems = [path.stem for path in NOTEBOOKS]
    assert stems == ["flax_training", "optimizers", "sequences", "sharded_training"]


def test_a_notebook_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert notebook.cells[0].source.startswith("# "), "the title in a first cell"


def run(notebook, monkeypatch, tmp_path):
    """Executes as in a shell of its own: the eight devices of the tests are not set."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    return "".join(output.text for output in outputs(notebook, "stream"))


@pytest.mark.slow
def test_a_notebook_runs_and_draws(notebook, monkeypatch, tmp_path):
    text = run(notebook, monkeypatch, tmp_path)
    drawn = [
        out for out in outputs(notebook, "display_data") if "image/png" in out.data
    ]
    plots = sum("plt.subplots" in cell.source for cell in code_cells(notebook))
    assert len(drawn) == plots >= 2
    # Whatever a notebook compares with itself or with another library, it finds equal.
    assert "bit for bit: False" not in text
    shown = outputs(notebook, "execute_result")
    assert not shown, "a cell ends with a value that nobody asked for"
