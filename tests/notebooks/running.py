"""Notebooks run from top to bottom by a kernel of this interpreter; as a program, all are stored with what they showed, and
pages get the pictures that they share with them.

``make notebooks`` does that. What is stored is what cells printed and drew: no warnings, no times, no ids of this run, so that
a difference of two versions is one that a reader of the notebook sees.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.fix_spark import environment

FOLDER = Path(__file__).parents[2] / "notebooks"
_LONGEST_CELL_S = 300
# Pictures of pages: the notebook, and words of the one cell that draws it.
PICTURES = {
    FOLDER.parent / "docs" / "pictures" / "lag-chart.png": ("01_first_stream.ipynb", "LagChart(query)"),
    FOLDER.parent / "docs" / "pictures" / "members.png": ("03_consumer_groups.ipynb", 'label="poison"'),
    FOLDER.parent / "docs" / "pictures" / "spool.png": ("04_outage_and_delays.ipynb", "in the spool"),
}


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs this, whatever kernels the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="tests", language="python")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def run(name: str) -> Any:
    """The notebook of that name, with what its cells show now. The environment is that of a Spark driver."""
    return NotebookClient(read(name), timeout=_LONGEST_CELL_S, kernel_manager_class=ThisPython).execute()


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    """What a cell printed, and the value that it ended with, as text."""
    texts = [o["text"] for o in cell.outputs if o["output_type"] == "stream" and o["name"] == "stdout"]
    texts += [o["data"].get("text/plain", "") for o in cell.outputs if o["output_type"] == "execute_result"]
    return "".join(texts)


def pictures(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def shape(text: str) -> str:
    """A text without what differs from run to run: numbers, and how wide a table is for their sake."""
    text = re.sub(r"\d+([.:]\d+)*", "#", text)
    return re.sub(r"-{2,}", "--", re.sub(r" *\| *", "|", re.sub(r"[ \t]+", " ", text)))


def stored(done: Any) -> Any:
    """A notebook as it is kept: outputs of readers' interest, cells numbered in their order."""
    for number, cell in enumerate(cells(done), 1):
        cell.metadata.pop("execution", None)
        cell.execution_count = number
        cell.outputs = [_kept(output, number) for output in cell.outputs if output.get("name") != "stderr"]
    done.metadata = read_metadata()
    return done


def read_metadata() -> Any:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})


def _kept(output: Any, number: int) -> Any:
    if "execution_count" in output:
        output["execution_count"] = number
    if "data" in output:
        output["data"] = {kind: value for kind, value in output["data"].items() if kind in ("text/plain", "image/png")}
    return output


def shown_elsewhere() -> dict[Path, bytes]:
    """The pictures of pages, as notebooks have them."""
    found = {}
    for picture, (name, words) in PICTURES.items():
        (cell,) = [cell for cell in cells(read(name)) if words in cell.source]
        (data,) = [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        found[picture] = base64.b64decode(data)
    return found


if __name__ == "__main__":
    os.environ.update(environment())
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        print(name, flush=True)
        nbformat.write(stored(run(name)), FOLDER / name)
    for path, content in shown_elsewhere().items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
