"""README.md and the pages, as texts: their commands are right usage, their Python blocks are Python, and name what there is.

Nothing is run here; what the programs of users' pages do is tested in ``tests/spark/test_pages.py``.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from docs import draw_pictures
from rocketmq_spark import options
from rocketmq_spark.cli.command import app
from tests.test_house import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS = {name.lower() for row in options.TABLE for name in (row.name, *row.aliases)} | options.TOLERATED_OPTIONS
COMMAND = "rocketmq-spark"


# A program in a block of shell lines.
_PROGRAM = re.compile(r"^python - <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block, and where it stands: ``page.md:line``."""

    place: str
    language: str
    text: str


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text("utf-8")
    for found in re.finditer(r'^([ ]*)```(\w*)(?: title="[^"]+")?\n(.*?)^\1```$', text, re.MULTILINE | re.DOTALL):
        place = f"{path.name}:{text.count(chr(10), 0, found.start()) + 2}"
        yield Block(place, found[2], textwrap.dedent(found[3]))
        for program in re.findall(_PROGRAM, found[3]):
            yield Block(place, "python", program)


def prose(path: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def lines() -> Iterator[tuple[str, str]]:
    """Every line of a block that calls the command, as a shell would see it, and its block."""
    for block in (block for path in PAGES for block in blocks(path)):
        for line in block.text.replace("\\\n", " ").splitlines():
            call = re.match(rf"(?:\$ )?(?:\w+=\S+ )*{COMMAND} (.*)", line.strip())
            if call:
                yield block.place, call[1]


def mentions() -> Iterator[tuple[str, str]]:
    """The command as text and tables name it, where what may be left out stands in brackets."""
    for path in PAGES:
        for call in re.findall(rf"`{COMMAND} ([^`]+)`", prose(path)):
            yield path.name, call


def found(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words lead to, and the words behind it; raises ``KeyError`` where there is none."""
    command: click.Command = app
    left = list(words)
    while isinstance(command, click.Group) and left and not left[0].startswith("-"):
        name = left.pop(0)
        below = command.get_command(click.Context(command), name)
        if below is None:
            raise KeyError(name)
        command = below
    return command, left


PYTHON = [block for path in PAGES for block in blocks(path) if block.language in ("python", "py")]
python = pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)


@pytest.mark.parametrize(("place", "line"), list(lines()))
def test_a_command_in_a_block_is_right_usage(place: str, line: str) -> None:
    command, arguments = found(shlex.split(line, comments=True))
    assert not isinstance(command, click.Group)
    command.make_context(COMMAND, arguments)


@pytest.mark.parametrize(("place", "call"), list(mentions()))
def test_a_command_in_a_sentence_exists_with_its_options(place: str, call: str) -> None:
    command, left = found(re.sub(r"[\[\]]", " ", call).split())
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in left if word.startswith("-")} <= known | {"--help"}


def test_the_pages_have_commands_and_programs() -> None:
    """The patterns above find what is there."""
    assert len(list(lines())) >= 18
    assert len(list(mentions())) >= 20
    fences = sum(
        len(
            re.findall(
                r"""^ *```(?:python|py)(?: title="[^"]+")?$|^python - <<'END'$""", path.read_text("utf-8"), re.MULTILINE
            )
        )
        for path in PAGES
    )
    assert len(PYTHON) == fences >= 30


def test_links_into_a_page_lead_to_a_heading() -> None:
    """As the site makes anchors of headings, which differs from GitHub's way where a heading has two blanks side by side."""
    headings = {path.name: {_anchor(one) for one in _headings(path)} for path in PAGES}
    wrong = [
        f"{path.name}: {page}#{anchor}"
        for path in PAGES
        for page, anchor in re.findall(r"\]\((?:docs/|\.\./|how-to/)?([\w.-]*)#([^)]+)\)", path.read_text("utf-8"))
        if anchor not in headings.get(page or path.name, set())
    ]
    assert not wrong


def _headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)


def _anchor(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading, flags=re.ASCII).strip().lower())


def test_each_feature_has_tests_or_is_left_out() -> None:
    """Those that the page names are there."""
    rows = [line for line in (ROOT / "docs" / "features.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    named = [row for row in rows if "`tests/" in row]
    assert len(named) > 30
    assert [
        row
        for row in rows
        if row not in named and "left out" not in row and "tested by" not in row and "---" not in row
    ] == []
    files = {file for row in named for file in re.findall(r"`(tests/[^`]+)`", row)}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_programs_of_users_pages_are_typed(tmp_path: Path) -> None:
    """By mypy and by pyright, as editors see them. Names such as ``spark`` come from the program around a block."""
    for path in PAGES:
        if path.name != "upstream.md":  # Spark's own examples
            for number, block in enumerate(b for b in blocks(path) if b.language in ("python", "py")):
                name = f"{path.stem.replace('-', '_')}_{number}.py"
                (tmp_path / name).write_text(f"# {block.place}\n{block.text}", "utf-8")
    programs = sorted(str(program) for program in tmp_path.glob("*.py"))
    assert len(programs) > 25
    lenient = "--check-untyped-defs --ignore-missing-imports --disable-error-code name-defined --disable-error-code var-annotated"
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *lenient.split(), "--config-file=", "--cache-dir", str(tmp_path / "cache"), *programs],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
    wrong = tmp_path / "wrong.py"
    wrong.write_text('from rocketmq_spark import Producer\nProducer("host:9876", send_timeot="3s")\n')
    off = ("reportUndefinedVariable", "reportMissingImports", "reportMissingModuleSource")
    config = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], **dict.fromkeys(off, False)}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    pyright = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        str(tmp_path),
    ]
    found = json.loads(subprocess.run(pyright, cwd=tmp_path, capture_output=True, text=True).stdout)
    assert [Path(each["file"]).name for each in found["generalDiagnostics"]] == [wrong.name], found
    assert found["summary"]["filesAnalyzed"] > len(programs)


@python
def test_a_block_is_python(block: Block) -> None:
    compile(block.text, block.place, "exec")


@python
def test_what_a_block_imports_of_ours_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rocketmq_spark"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@python
def test_options_of_a_block_are_options(block: Block) -> None:
    """All of one block are ours, or Spark's own that every source is handed; Kafka's stand in blocks that say so."""
    if 'format("kafka")' not in block.text:
        assert [name for name in re.findall(r'\.option\("([^"]+)"', block.text) if name.lower() not in OPTIONS] == []


def test_pictures_show_the_figures_of_the_page():
    rate, parts = draw_pictures.figures("Reads, 100 B, broker with stock limits", "Spark batch read, all columns")
    assert f"| {rate:g} |" in (ROOT / "docs" / "performance.md").read_text("utf-8")
    reads, _ = draw_pictures.cost().axes
    assert reads.texts[0].get_text() == f"{rate:,.0f} k/s"
    assert sum(
        bar.get_width() for bar in reads.patches if abs(bar.get_y() + bar.get_height() / 2) < 0.01
    ) == pytest.approx(sum(parts))


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_pictures_are_drawn_by_code_and_on_a_page(name: str):
    file = f"{name}.png"
    assert (ROOT / "docs" / "pictures" / file).exists()
    assert any(f"pictures/{file})" in page.read_text("utf-8") for page in PAGES)
    assert draw_pictures.PICTURES[name]().axes


def test_no_page_has_files_where_all_users_may_put_theirs() -> None:
    """Another user who is first there decides what a query reads, whom a client trusts, and with which keys it signs."""
    places = [
        block.place
        for path in PAGES
        for block in blocks(path)
        for line in block.text.splitlines()
        if "/tmp/" in line and not line.startswith(("COPY ", "RUN "))  # in an image there are no other users
    ]
    assert places == []
    assert [path.name for path in (ROOT / "examples").glob("*.py") if "/tmp/" in path.read_text("utf-8")] == []
