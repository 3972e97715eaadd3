"""Records ``rocketmq-spark demo`` in a terminal and draws it as an animated SVG: ``make cast``.

The program records a real run, from the first batch of Spark to the counts at the end, and plays it faster; the title of the
picture says how much. Viewers that do not animate SVG show the last frame.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyte

HERE = Path(__file__).parent
COLUMNS, ROWS = 100, 27
# The animation takes ``PLAY_S`` seconds, and shows its last frame for ``HOLD_S`` more.
PLAY_S, HOLD_S = 8.0, 6.0
# The first frame shows BEGIN; the last line has END.
BEGIN, END = "writing orders", "All agree."
# A run in which the driver was killed between two batches is not recorded: it shows less.
KILL = re.compile(rb"kill -9 of Spark's driver in batch \d")

_SIZE, _CELL_WIDTH, _LINE_HEIGHT, _MARGIN, _TITLE_HEIGHT = 14, 8.43, 18, 12, 30
_BACKGROUND, _TEXT = "#1b1e28", "#d8dce6"
_BUTTONS = "ff5f57", "febc2e", "28c840"
_COLOURS = {"red": "#ff7b85", "green": "#8fd694", "brown": "#e6c07b", "blue": "#82aaff", "cyan": "#7fdbca"}


class Frame(NamedTuple):
    """A screen that is shown from ``at_s`` on, with its lines as SVG."""

    at_s: float
    lines: tuple[str, ...]


def record(command: Sequence[str]) -> Iterator[tuple[float, bytes]]:
    """Run the command in a terminal. Yield each part of what the command prints, with the seconds since its start."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    while part := _read(main):
        yield time.monotonic() - began, part
    os.close(main)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")


def _read(terminal: int) -> bytes:
    """Read what is printed next; empty when the command has ended."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux: the terminal's other side is closed
        return b""


def checked(parts: Iterator[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the parts up to ``END``. Ends the program, before it writes a recording, if the run did not show the kill in a batch
    and the end.
    """
    printed, end = b"", -1
    for at_s, part in parts:
        if end >= 0:
            continue  # read on, so that the command can end
        start = len(printed)
        printed += part
        end = printed.find(END.encode())
        # What follows names folders of this machine.
        yield at_s, part[: end + len(END) - start] if end >= 0 else part
    if end < 0:
        raise SystemExit(f"nothing is recorded: the run never showed {END!r}")
    if not KILL.search(printed):
        raise SystemExit(
            "nothing is recorded: Spark's driver was not killed in a batch. Run it again, with more --seconds"
        )


def frames(parts: Iterator[tuple[float, bytes]]) -> Iterator[Frame]:
    """Yield each screen that differs from the one before, from the first with ``BEGIN`` on."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    last: tuple[str, ...] = ()
    begun = False
    for at_s, part in parts:
        stream.feed(part)
        begun = begun or any(BEGIN in line for line in screen.display)
        lines = tuple(line_of(screen, row) for row in range(ROWS))
        if begun and lines != last:
            yield Frame(at_s, lines)
        last = lines


def line_of(screen: pyte.Screen, row: int) -> str:
    """Return the cells of a row as ``tspan`` elements: one for each run of cells with the same colour and weight."""
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    text, start = "", 0
    while start < COLUMNS:
        end = start
        while end < COLUMNS and style_of(cells[end]) == style_of(cells[start]):
            end += 1
        run = "".join(cell.data for cell in cells[start:end])
        if run.strip():
            x = f"{_MARGIN + start * _CELL_WIDTH:.1f}"
            text += f'<tspan x="{x}"{style_of(cells[start])}>{html.escape(run.rstrip(), quote=False)}</tspan>'
        start = end
    return text


def style_of(cell: pyte.screens.Char) -> str:
    colour = _COLOURS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else "")
    return (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if cell.bold else "")


def svg(shown: Sequence[Frame]) -> str:
    """Return the picture. The frames stand below each other on a strip, and the animation moves the strip behind a window."""
    began, lasted = shown[0].at_s, shown[-1].at_s - shown[0].at_s
    speed = max(1.0, lasted / PLAY_S)
    duration_s = lasted / speed + HOLD_S
    width, height = 2 * _MARGIN + COLUMNS * _CELL_WIDTH, ROWS * _LINE_HEIGHT + _MARGIN
    steps = "".join(
        f"{100 * (frame.at_s - began) / speed / duration_s:.2f}%{{transform:translateY({-i * height}px)}}"
        for i, frame in enumerate(shown)
    )
    ids = {line: f"l{i}" for i, line in enumerate(dict.fromkeys(line for frame in shown for line in frame.lines))}
    definitions = "".join(f'<text id="{name}">{line}</text>' for line, name in ids.items() if line)
    film = "".join(
        f'<use href="#{ids[line]}" y="{i * height + (row + 1) * _LINE_HEIGHT}"/>'
        for i, frame in enumerate(shown)
        for row, line in enumerate(frame.lines)
        if line
    )
    dots = "".join(
        f'<circle cx="{18 + 18 * i}" cy="15" r="5.5" fill="#{colour}"/>' for i, colour in enumerate(_BUTTONS)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + _TITLE_HEIGHT}" role="img">
<title>rocketmq-spark demo: Spark's driver is killed in the middle of a batch; orders written, read and summed up agree</title>
<style>
text{{font:{_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:{_TEXT};white-space:pre}}
.film{{transform:translateY({-(len(shown) - 1) * height}px);animation:film {duration_s:.1f}s step-end infinite}}
@keyframes film{{{steps}}}
@media (prefers-reduced-motion:reduce){{.film{{animation:none}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="{_BACKGROUND}"/>
{dots}<text x="50%" y="20" text-anchor="middle" fill-opacity=".7">rocketmq-spark demo, {speed:.0f} times as fast</text>
<defs>{definitions}</defs>
<svg y="{_TITLE_HEIGHT}" width="100%" height="{height}"><g class="film">{film}</g></svg>
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", type=Path, default=HERE / "pictures" / "demo.svg")
    parser.add_argument("--seconds", default="50", help="how long the demo writes orders")
    arguments = parser.parse_args()
    command = [str(Path(sys.executable).parent / "rocketmq-spark"), "demo", "--seconds", arguments.seconds]
    arguments.target.write_text(svg(list(frames(checked(record(command))))), "utf-8")
    print(f"{arguments.target}, {arguments.target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
