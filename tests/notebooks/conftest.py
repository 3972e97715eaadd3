"""Notebooks run from top to bottom by a kernel of this interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.fix_spark import environment

FOLDER = Path(__file__).parents[2] / "notebooks"


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="tests", language="python")


class Done(NamedTuple):
    """What a notebook printed, and how many images it shows."""

    text: str
    images: int


@pytest.fixture
def run_notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Done]:
    """A function that runs the notebook of that name."""

    def run(name: str) -> Done:
        for variable, value in environment().items():
            monkeypatch.setenv(variable, value)
        notebook: Any = nbformat.read(FOLDER / name, as_version=4)
        done = NotebookClient(notebook, timeout=300, kernel_manager_class=ThisPython).execute()
        outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell["outputs"]]
        printed = [o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout"]
        return Done("".join(printed), sum("image/png" in o.get("data", {}) for o in outputs))

    return run
