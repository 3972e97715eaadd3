"""``python -m benchmarks.markdown FILE``: the tables of docs/performance.md from what ``--json FILE`` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tables(document: dict[str, Any]) -> Iterator[str]:
    """Markdown lines: targets first, then every section."""
    yield from _row("figure", "bytes", "target", "measured", "two-core bound", "")
    yield from _row("---", "---:", "---:", "---:", "---:", "---")
    for target in document["targets"]:
        held = {True: "held", False: "**not held**", None: ""}[target["held"]]
        value, bound = target["value"], target.get("two_core_bound")
        yield from _row(
            target["target"], target["size"] or "", f"{target['wanted']:g}",
            "not measured" if value is None else f"{value:.2f}", "" if bound is None else f"{bound:.2f}", held,
        )  # fmt: skip
    for section, cases in document["figures"].items():
        yield from ("", f"**{section}**", "")
        names = list(dict.fromkeys(name for figures in cases.values() for name in figures))
        yield from _row("", *(_title(name) for name in names))
        yield from _row("---", *("---:" for _ in names))
        for case, figures in cases.items():
            yield from _row(case, *(_number(figures.get(name)) for name in names))


def _row(*cells: object) -> Iterator[str]:
    yield "| " + " | ".join(map(str, cells)) + " |"


def _title(name: str) -> str:
    return name.removesuffix("_us") + " µs" if name.endswith("_us") else name


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    print("\n".join(tables(json.loads(Path(sys.argv[1]).read_text("utf-8")))))
