"""Draws the pictures of the pages that no notebook draws: ``python docs/draw_pictures.py``.

Rates and CPU times are those of performance.md. All pictures have a white ground, which the site inverts on dark pages, and
colours that differ in brightness, too (blue, orange, grey).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
BLUE, ORANGE, GREY, LIGHT = "#1f77b4", "#ff7f0e", "#7f7f7f", "#f2f2f2"
SIZE = 10.0


def main() -> None:
    for name, draw in PICTURES.items():
        draw().savefig(HERE / "pictures" / f"{name}.png", dpi=90)


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure without axes, in which one unit is a tenth of an inch."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10 * width)
    axes.set_ylim(0, 10 * height)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, place: tuple[float, float, float, float], text: str, colour: str = BLUE) -> None:
    """A box with a heading, the first line of the text, and what is below it. ``place``: left, bottom, width, height."""
    x, y, width, height = place
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=1", facecolor=LIGHT, edgecolor=colour)
    )
    heading, _, rest = text.partition("\n")
    axes.text(x + 1.2, y + height - 1.2, heading, size=SIZE, weight="bold", va="top")
    axes.text(x + 1.2, y + height - 3.6, rest, size=SIZE - 1, va="top", linespacing=1.35)


Ends = tuple[tuple[float, float], tuple[float, float]]


def arrow(axes: Axes, ends: Ends, text: str = "", turned: float = 0.0, colour: str = GREY, style: str = "-|>") -> None:
    """An arrow with a text above it, turned by degrees."""
    start, end = ends
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": colour, "linewidth": 1.6})
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.8
    axes.text(*middle, text, size=SIZE - 1, ha="center", va="bottom", rotation=turned)


def architecture() -> Figure:
    figure, axes = blank(10, 6.0)
    box(axes, (2, 35.5, 30, 23), "Spark driver\n")
    box(axes, (4, 46.5, 26, 8), "Planner (Python)\nends of queues, ranges of offsets,\nsmall batches as a whole")
    box(axes, (4, 37, 26, 8), "Offset log, checkpoint\npositions; for exactly-once writes\na note of each batch", GREY)
    box(axes, (2, 15, 30, 18), "Spark tasks (Python workers)\n")
    box(axes, (4, 23, 26, 6), "Source\npulls in parallel, decodes columns")
    box(axes, (4, 16, 26, 6), "Sink\nencodes columns, a batch per send", ORANGE)
    box(
        axes,
        (2, 2, 30, 10.5),
        "Python without Spark\nProducer, Consumer, PullConsumer,\nAdmin, commands; also with asyncio",
    )
    box(axes, (70, 50, 28, 8.5), "Name servers\nroutes of topics")
    box(axes, (70, 8, 28, 38), "Brokers\nqueues of a topic")
    for i, queue in enumerate(("broker-a / 0", "broker-a / 1", "broker-b / 0", "broker-b / 1")):
        box(axes, (73, 34 - 7 * i, 22, 5), f"orders / {queue}", GREY)
    arrow(axes, ((32, 55), (69.7, 55)), "1  routes of topics, every 10 s")
    arrow(axes, ((32, 45), (69.7, 41)), "2  where queues end, in each micro-batch", -5.5)
    arrow(axes, ((69.7, 32), (32, 27)), "3  messages: many pulls at a time", 7, BLUE)
    arrow(axes, ((32, 19), (69.7, 23)), "4  batches of messages", 5.5, ORANGE)
    arrow(axes, ((32.3, 7), (69.7, 12)), "messages, batches", 7, style="<|-|>")
    arrow(axes, ((17, 35.2), (17, 33.3)))
    return figure


def exactly_once() -> Figure:
    figure, axes = blank(10, 4.2)
    x0, x1, top = 26.0, 97.0, 36.0
    axes.axvspan(44, 74, color="#dce9f5", ymin=0.2, ymax=0.9)
    axes.text(59, 39.5, "these ids are read", size=SIZE, ha="center", color=BLUE, weight="bold")
    for at, text in (
        (44, "end of the queue\nbefore the batch (the note)"),
        (74, "nothing of an earlier\nattempt can arrive any more"),
    ):
        axes.plot((at, at), (8.4, top + 2), color=BLUE, linewidth=1.2, linestyle="--")
        axes.text(at, 4.0, text, size=SIZE - 1, ha="center", va="bottom", linespacing=1.3)
    cases = (
        ("a driver restarts", "the planner reads the ids,\nthen tasks send what is missing", "oooo", "xxoxoxx", "xxx"),
        ("a task is retried", "the task reads the ids,\nthen sends what is missing", "oooo", "xoxxo", "xxxx"),
        ("an answer is lost", "the engine reads the ids,\nthen sends what is missing", "oooo", "ooxx", "xx"),
    )
    for row, (case, who, before, between, after) in enumerate(cases):
        y = top - 4 - 9.5 * row
        axes.text(2, y + 1.2, case, size=SIZE, weight="bold", va="center")
        axes.text(2, y - 2.2, who, size=SIZE - 1, va="center", linespacing=1.3)
        axes.plot((x0, x1), (y, y), color=GREY, linewidth=1)
        for marks, start, step, again in ((before, 29, 3.6, False), (between, 47, 3.6, False), (after, 80, 3.6, True)):
            for i, mark in enumerate(marks):
                colour = GREY if mark == "o" else ORANGE
                axes.plot(
                    start + step * i,
                    y,
                    "o",
                    markersize=9,
                    color=colour,
                    fillstyle="none" if again else "full",
                    markeredgewidth=2,
                )
    for x, colour, filled, text in (
        (27, GREY, "full", "messages of other writers"),
        (52, ORANGE, "full", "rows that are stored already"),
        (78, ORANGE, "none", "rows that are sent now"),
    ):
        axes.plot(x, 1.6, "o", markersize=8, color=colour, fillstyle=filled, markeredgewidth=2)
        axes.text(x + 1.6, 1.6, text, size=SIZE - 1, va="center")
    return figure


def figures(section: str, case: str) -> tuple[float, list[float]]:
    """The median rate of a case in performance.md, in thousand messages a second, and its CPU times: server, Python, JVM."""
    page = (HERE / "performance.md").read_text("utf-8")
    rows = page[page.index(f"**{section}**") :].split("\n\n", 2)[1].splitlines()
    heads, *_ = rows
    (row,) = (row for row in rows if row.startswith(f"| {case} |"))
    found = dict(
        zip((cell.strip() for cell in heads.split("|")), (cell.strip() for cell in row.split("|")), strict=True)
    )
    return float(found["median"].replace(",", "")), [float(found[f"{part} µs"]) for part in ("server", "python", "jvm")]


def cost() -> Figure:
    figure = Figure(figsize=(10, 4.2), facecolor="white", layout="constrained")
    sides = figure.subplots(1, 2)
    pairs = (
        (
            "Reads",
            "Reads, {}, broker with stock limits",
            (
                ("this source", "Spark batch read, all columns"),
                ("spark-sql-kafka", "spark-sql-kafka batch read"),
                ("Java consumer", "Java pull consumer, 8 threads"),
            ),
        ),
        (
            "Writes",
            "Writes until they can be read, {}",
            (
                ("this sink", "Spark batch write"),
                ("spark-sql-kafka", "spark-sql-kafka batch write"),
                ("Java producer", "Java batches of 1 MiB, 2 threads"),
            ),
        ),
    )
    for axes, (title, section, cases) in zip(sides, pairs, strict=True):
        labels = []
        for row, (size, (label, case)) in enumerate((size, each) for size in ("100 B", "1 KiB") for each in cases):
            rate, parts = figures(section.format(size), case)
            left = 0.0
            for part, colour, name in zip(parts, (GREY, BLUE, ORANGE), ("broker", "Python", "JVM"), strict=True):
                axes.barh(row, part, left=left, color=colour, label=name if row == 0 else None)
                left += part
            axes.text(left + 0.15, row, f"{rate:,.0f} k/s", va="center", size=SIZE - 1)
            labels.append(f"{label}, {size}")
        axes.set_yticks(range(len(labels)), labels, size=SIZE - 1)
        axes.invert_yaxis()
        axes.set_xlim(right=1.18 * axes.get_xlim()[1])
        axes.set_title(title, size=SIZE)
        axes.set_xlabel("CPU µs per message")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*sides[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


PICTURES = {"architecture": architecture, "exactly-once": exactly_once, "cost": cost}

if __name__ == "__main__":
    main()
