"""The notebooks do what they say: what their cells print is what they promise."""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from docs import draw_pictures
from tests.notebooks import running
from tests.notebooks.conftest import Done
from tests.notebooks.running import FOLDER
from tests.scale import soak

DOCS = FOLDER.parent / "docs"
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_they_are_committed_with_their_outputs(path: Path) -> None:
    """As ``make notebooks`` leaves them: a visitor sees what cells printed and drew, and nothing of the machine they ran on."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = running.cells(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum(map(running.pictures, code)) >= 1
    assert len([cell for cell in code if running.printed(cell)]) >= 5
    for cell in code:
        assert {output.get("name", "stdout") for output in cell.outputs} <= {"stdout"}
        assert not [output for output in cell.outputs if output["output_type"] == "error"]
    text = "".join(map(running.printed, code))
    assert str(Path.home()) not in text
    assert "/tmp" not in text
    assert nbformat.writes(running.stored(copy.deepcopy(notebook))) == nbformat.writes(notebook)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_their_cells_are_programs_and_what_they_import_is_there(path: Path) -> None:
    """Whatever else they do, ``make soak`` shows for all of them, and the first runs always."""
    programs = [ast.parse(cell.source) for cell in running.cells(nbformat.read(path, as_version=4))]
    imported = [node for one in programs for node in ast.walk(one) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imported
    for node in imported:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        else:
            for name in node.names:
                importlib.import_module(name.name)


def test_pages_show_the_pictures_that_notebooks_drew() -> None:
    """``make notebooks`` writes both; other pictures are drawn by code, or recorded by ``make cast``."""
    pages = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    found = running.shown_elsewhere()
    drawn = [DOCS / "pictures" / f"{name}.png" for name in draw_pictures.PICTURES]
    assert sorted((DOCS / "pictures").iterdir()) == sorted([*found, *drawn, DOCS / "pictures" / "demo.svg"])
    for path, content in found.items():
        assert path.read_bytes() == content, "run: make notebooks"
        assert f"](pictures/{path.name})" in pages


def test_the_shape_of_a_text() -> None:
    one = "+---+-----+\n|  3|12:30| 7.5 s\n"
    assert running.shape(one) == running.shape("+----+---+\n|1234|9:1| 0.25 s\n")
    assert running.shape(one) != running.shape("+---+-----+\n|  3|12:30| 7.5 min\n")


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
    assert "behind: 0 messages in 4 queues, brokers away: []" in text
    assert "- rows: 3000 - behind at the end: 0" in text
    assert images == 2


@soak
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


@soak
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


@soak
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
