"""``make cast`` records only a run that shows what the picture is for."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from docs import record_demo

KILL = b"\x1b[1;31mkill -9 of Spark's driver in batch 23, 6 of its totals stored ... Spark starts again\x1b[0m\r\n"
BETWEEN = b"\x1b[1;31mkill -9 of Spark's driver between two batches ... Spark starts again\x1b[0m\r\n"
END = b"25,011 = 25,011 = 25,011. All agree."
AFTER = b"\r\nData, checkpoint and Spark's log: /home/me\r\n"


def recorded(*parts: bytes) -> list[bytes]:
    return [part for _, part in record_demo.checked(iter(enumerate(parts)))]


def test_a_run_with_a_kill_in_a_batch_is_recorded() -> None:
    parts = [KILL[:20], KILL[20:], END]
    assert recorded(*parts) == parts


@pytest.mark.parametrize(
    "parts",
    [(KILL + END + AFTER,), (KILL, END[:-5], END[-5:] + AFTER, AFTER), (KILL, END, AFTER)],
    ids=["in one part", "in two parts", "at the end of a part"],
)
def test_the_recording_ends_with_the_counts(parts: tuple[bytes, ...]) -> None:
    """What follows names folders of the machine. All of it is read, so that the command can end."""
    source = iter(enumerate(parts))
    assert b"".join(part for _, part in record_demo.checked(source)) == KILL + END
    assert list(source) == []


@pytest.mark.parametrize(("parts", "reason"), [((KILL,), "All agree"), ((BETWEEN, END), "not killed in a batch")])
def test_a_run_without_kill_or_end_is_not_recorded(parts: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(SystemExit, match=f"nothing is recorded.*{reason}"):
        recorded(*parts)


def test_all_that_the_command_prints_is_read_with_its_time() -> None:
    program = "import time; print('one', flush=True); time.sleep(0.2); print('two')"
    parts = list(record_demo.record([sys.executable, "-c", program]))
    assert b"".join(part for _, part in parts) == b"one\r\ntwo\r\n"
    assert parts[-1][0] >= parts[0][0] + 0.1


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        list(record_demo.record([sys.executable, "-c", "raise SystemExit(3)"]))


def test_the_picture_plays_each_frame_and_stays_on_the_last() -> None:
    """Lines that several frames share are stored once. The strip moves up by one frame at a time."""
    frames = [record_demo.Frame(10.0 * i, (f"<tspan>line {i}</tspan>", "<tspan>same</tspan>", "")) for i in range(3)]
    picture = ElementTree.fromstring(record_demo.svg(frames))
    texts = [text.findtext("{*}tspan") for text in picture.iterfind("{*}defs/{*}text")]
    assert texts == ["line 0", "same", "line 1", "line 2"]
    assert len(picture.findall("{*}svg/{*}g/{*}use")) == 6
    style = picture.findtext("{*}style")
    assert style is not None
    steps = re.findall(r"([\d.]+)%{transform:translateY\((-?\d+)px\)}", style)
    height = float(picture.find("{*}svg").attrib["height"])
    assert [(float(at), float(y)) for at, y in steps] == [(0.0, 0.0), (28.57, -height), (57.14, -2 * height)]
    assert f".film{{transform:translateY({-2 * height:.0f}px)" in style
    assert "demo, 2 times as fast" in picture.findtext("{*}text")


def test_cells_of_one_style_are_one_element() -> None:
    cell = SimpleNamespace(data=" ", fg="default", bold=False)
    cells = [cell] * record_demo.COLUMNS
    cells[2:5] = [SimpleNamespace(data=letter, fg="red", bold=True) for letter in "a<b"]
    cells[5:7] = [SimpleNamespace(data=letter, fg="12ab34", bold=False) for letter in "cd"]
    screen: Any = SimpleNamespace(buffer=[cells])
    x = [f"{12 + 8.43 * column:.1f}" for column in (2, 5)]
    assert record_demo.line_of(screen, 0) == (
        f'<tspan x="{x[0]}" fill="#ff7b85" font-weight="bold">a&lt;b</tspan><tspan x="{x[1]}" fill="#12ab34">cd</tspan>'
    )
