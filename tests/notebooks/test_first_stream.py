"""Notebook 01, run from top to bottom by a kernel of this interpreter; what its cells print is what they promise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.fix_spark import environment

PATH = Path(__file__).parents[2] / "notebooks" / "01_first_stream.ipynb"


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="tests", language="python")


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(PATH, as_version=4)


def printed(cell: Any) -> str:
    return "".join(o["text"] for o in cell["outputs"] if o["output_type"] == "stream" and o["name"] == "stdout")


def test_it_is_committed_without_outputs(notebook: Any) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_does_what_it_says(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    client = NotebookClient(notebook, timeout=300, kernel_manager_class=ThisPython)
    done = client.execute()
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    text = "\n".join(map(printed, code))
    assert "name server: 127.0.0.1" in text
    assert "2000 orders acknowledged" in text
    assert " |-- body: binary" in text
    assert "2000 messages: {'africa': " in text
    assert "orders read: 3000" in text
    assert int(text.partition("batches: ")[2].split()[0]) >= 3
    images = [o for cell in code for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(images) == 1
