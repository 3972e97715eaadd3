"""The notebooks do what they say: what their cells print is what they promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.conftest import FOLDER, Done

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_they_are_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


def number(text: str, after: str) -> int:
    return int(text.partition(after)[2].split()[0])


def test_first_stream(run_notebook: Callable[[str], Done]) -> None:
    text, images = run_notebook("01_first_stream.ipynb")
    assert "name server: 127.0.0.1" in text
    assert "2000 orders acknowledged" in text
    assert " |-- body: binary" in text
    assert "2000 messages: {'africa': " in text
    assert "orders read: 3000" in text
    assert number(text, "batches: ") >= 3
    assert images == 1


def test_writing(run_notebook: Callable[[str], Done]) -> None:
    text, images = run_notebook("02_writing.ipynb")
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
    assert images == 1


def test_consumer_groups(run_notebook: Callable[[str], Done]) -> None:
    text, images = run_notebook("03_consumer_groups.ipynb")
    assert "queues: 12" in text
    assert "queues of each: {'anna': 4, 'bert': 4, 'cleo': 4}" in text
    assert "queues of each: {'anna': 6, 'cleo': 6}" in text
    assert "attempts: [0, 1, 2, 3]" in text
    assert "poison" in text.partition("attempts")[2]
    assert number(text, "sent: ") > 100
    assert "- missing: 0\n" in text
    assert number(text, "- of these by bert before: ") <= number(text, "consumed twice: ")
    assert "exit codes: [0, 0]" in text
    assert images == 1


def test_outage_and_delays(run_notebook: Callable[[str], Done]) -> None:
    text, images = run_notebook("04_outage_and_delays.ipynb")
    assert "sent: {'SEND_OK'}" in text
    assert number(text, "spooled so far: ") >= 1
    assert "after the outage the spool holds: 0" in text
    assert "- missing: 0\n" in text
    assert number(text, "- of these by the spool: ") >= number(text, "spooled so far: ")
    assert "waiting: 80 " in text
    for delay in (1, 7, 59, 3601):
        assert f"after {delay} s: 20 delivered, early: 0" in text
    assert "stored: 80 - sent: 80" in text
    assert images == 2
