"""Notebook 02, run from top to bottom; what its cells print is what they promise."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.fix_spark import environment
from tests.notebooks.test_first_stream import PATH as FIRST
from tests.notebooks.test_first_stream import ThisPython, printed

PATH = FIRST.with_name("02_writing.ipynb")


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(PATH, as_version=4)


def number(text: str, after: str) -> int:
    return int(text.partition(after)[2].split()[0])


def test_it_is_committed_without_outputs(notebook: Any) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_does_what_it_says(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    done = NotebookClient(notebook, timeout=150, kernel_manager_class=ThisPython).execute()
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    text = "\n".join(map(printed, code))
    assert "brokers: broker-a, broker-b" in text
    assert "- column 'tag' is unknown; the sink takes body" in text
    assert "- column 'body' (or 'value') is missing" in text
    assert "- there is neither option 'topic' nor a column 'topic'" in text
    assert "round robin: 4000 rows in" in text
    assert "queues used: 8 of 8" in text
    assert "hash: customers 50 - most queues of one of them: 1" in text
    assert "chosen: broker-a 0 4000\nchosen: broker-b 3 4000" in text
    assert number(text, "{'auto_batch': True} - ") < 10
    assert number(text, "{'auto_batch': False} - ") == 4000
    assert "delayed: 3 requests, delivered after more than 1.5 s: True" in text
    assert number(text, "micro-batches without broker-a: ") >= 3
    assert "it is used again: True" in text
    assert "- missing: 0\n" in text
    assert number(text, "after dropDuplicates: ") == number(text, "acknowledged: ")
    images = [o for cell in code for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(images) == 1
