"""The command ``help``: the pages of the site, and the rows of their tables, in the terminal. Works without a network."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import click

import rocketmq_spark
from rocketmq_spark.cli.command import COMMANDS, CliCommand, app
from rocketmq_spark.cli.output import Output, width_of
from rocketmq_spark.errors import NotFound, RocketMQError

_HERE = Path(rocketmq_spark.__file__).parent
# In a wheel, and in a clone.
_FOLDERS = (_HERE / "pages", _HERE.parent / "docs")
_RECIPES = "how-to/"
# Pages whose tables have a row for each name.
_TABLES = ("errors", "options", "metrics")
_SETTINGS = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # of the site, above a page
_CELL = re.compile(r"(?<!\\)\|")


@click.command(cls=CliCommand)
@click.argument("topic", required=False)
@click.pass_context
def help(ctx: click.Context, topic: str | None) -> None:
    """Show a page of the documentation, an option or an error.

    TOPIC is the name of a page, an option or a command, or the code of an error: exactly-once, how-to/replay,
    startingTimestamp, ROCKETMQ_BUSY. Without TOPIC, list the pages.
    """
    output: Output = ctx.obj
    pages = _pages()
    if topic is None:
        rows = [{"page": name, "title": _title(_text(path))} for name, path in pages.items()]
        output.rows({"page": "PAGE", "title": "TITLE"}, rows)
        return
    name = topic.lower().removeprefix("docs/").removesuffix(".md")
    page = pages.get(name) or pages.get(_RECIPES + name)
    if page is not None:
        text = _text(page)
        output.item({"page": name, "text": text}, "") if output.machine else _show(text)
        return
    table = {name.lower(): (name, row) for each in _TABLES for name, row in _rows(_text(pages[each]))}
    command = app.get_command(ctx, topic)
    if topic.lower() in table:
        _, row = table[topic.lower()]
        output.item(row, "\n".join(f"{heading}: {cell}" for heading, cell in row.items()))
    if command is not None:  # also where an option has its name
        text = command.get_help(click.Context(command, parent=ctx.parent, info_name=topic))
        output.item({"command": topic, "text": text}, text)
    if command is not None or topic.lower() in table:
        return
    near = difflib.get_close_matches(topic.lower(), [*pages, *table], n=3, cutoff=0.7)
    hint = f"Did you mean {' or '.join(table[name][0] if name in table else name for name in near)}? " if near else ""
    verbs = [name for name, (text, _) in COMMANDS.items() if topic.lower() in re.findall(r"\w+", text.lower())]
    if verbs:
        hint = f"See {' or '.join(f'rocketmq-spark help {name}' for name in verbs[:3])}. "
    raise NotFound(f"there is no page, option or error {topic!r}", remedy=f"{hint}All pages: rocketmq-spark help")


def _pages() -> dict[str, Path]:
    """By name. Those of the recipes come last."""
    for folder in _FOLDERS:
        if (folder / "options.md").is_file():
            found = {str(path.relative_to(folder).with_suffix("")): path for path in folder.rglob("*.md")}
            return {name: found[name] for name in sorted(found, key=lambda name: ("/" in name, name))}
    raise RocketMQError("this installation has no pages", remedy="Install the wheel of rocketmq-spark again")


def _text(page: Path) -> str:
    return _SETTINGS.sub("", page.read_text(encoding="utf-8"))


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def _rows(text: str) -> list[tuple[str, dict[str, str]]]:
    """The rows of a page's tables, by each name in their first cell."""
    found: list[tuple[str, dict[str, str]]] = []
    headings: list[str] = []
    for line in text.split("\n"):
        cells = [cell.strip() for cell in _CELL.split(line.strip().strip("|"))] if line.startswith("|") else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        else:
            row = dict(zip(headings, (cell.replace("`", "").replace("\\|", "|") for cell in cells), strict=False))
            found += [(name, row) for name in re.findall(r"`([^`]+)`", cells[0])]
    return found


def _show(text: str) -> None:
    """As Markdown is, or drawn on a terminal."""
    width = width_of(sys.stdout)
    if width is None:
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(width, 120)).print(Markdown(text, hyperlinks=False))
