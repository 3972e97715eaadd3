"""The tree of commands, and what all commands share: exit codes, and the options ``--json`` and ``--debug``.

Exit codes: 0 done; 1 failure, with one line that gives the reason and the remedy; 2 wrong usage (click's own); 130 Ctrl-C.
If the pipe closes early (``| head -1``), read-only commands exit 0 and sending commands exit 1.

The file of a group is imported only when one of its commands is used.

The command ``help`` shows the pages of the documentation, and rows of their tables, in the terminal, without the network.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import rocketmq_spark
from rocketmq_spark.base import extras
from rocketmq_spark.cli.output import Json, Output, Text, width_of
from rocketmq_spark.errors import NotFound, OptionError, RocketMQError

INTERRUPTED_EXIT_CODE = 130


class CliCommand(click.Command):
    """A command whose function gets an ``Output`` with ``click.pass_obj``."""

    broken_pipe_exit_code = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(["--json"], is_flag=True, help="Print JSON, one object per line."),
            click.Option(["--debug"], is_flag=True, help="Show the stack trace of a failure."),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        output: Output = Json() if ctx.params.pop("json") else Text()
        debug = ctx.params.pop("debug")
        ctx.obj = output
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt as interrupt:
            for note in getattr(interrupt, "__notes__", ()):  # the notes name the brokers that have applied a change
                output.note(note)
            ctx.exit(INTERRUPTED_EXIT_CODE)
        except Exception as error:
            # No caller could handle the error, so every type of error is reported here.
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                _discard_output()
                ctx.exit(self.broken_pipe_exit_code)
            if debug:
                raise
            output.failure(error if isinstance(error, RocketMQError) else _as_rocketmq_error(error))
            ctx.exit(1)


class SendingCommand(CliCommand):
    """A command that sends messages while it prints. If it can no longer print, it also stops sending, so it has failed."""

    broken_pipe_exit_code = 1


class SuggestingGroup(click.Group):
    """A group of commands that suggests similar names for a misspelt command."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            similar_names = difflib.get_close_matches(args[0], names, n=2, cutoff=0.5)
            ratios = [difflib.SequenceMatcher(None, args[0], name).ratio() for name in similar_names]
            similar_names = [
                name for name, ratio in zip(similar_names, ratios, strict=True) if ratio > 0.75 * ratios[0]
            ]
            hint = f" Did you mean {' or '.join(similar_names)}?" if similar_names else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


class CliGroup(SuggestingGroup):
    """A group of ``CliCommand``."""

    command_class = CliCommand


def confirm(action: str, yes: bool) -> None:
    """Ask the user to confirm ``action`` on the terminal, unless ``--yes`` is given. Raises an error if the user does not
    confirm it.
    """
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():  # sys.stdin is None if stdin is closed
            raise click.UsageError(f"{action}. There is no terminal for the confirmation: give --yes")
        click.confirm(f"{action}?", abort=True, err=True)


def _reject_other_flag(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        raise click.UsageError(
            f"There is no {param.opts[0]}: without --yes the command only previews the change, and --yes applies it"
        )


def with_yes(command: Any) -> Any:
    """Add the option ``--yes`` (parameter ``apply_change``) to a command that otherwise only previews its change."""
    decorated_command = click.option(
        "--yes", "apply_change", is_flag=True, help="Apply the change; otherwise only preview it."
    )(command)
    for flag in ("--apply", "--execute", "--dry-run", "--send"):  # other tools and earlier releases have these flags
        decorated_command = click.option(
            flag, is_flag=True, hidden=True, expose_value=False, callback=_reject_other_flag
        )(decorated_command)
    return decorated_command


TIMES = "ISO-8601 (UTC without a zone), 1h (one hour ago), @milliseconds"


def time_ms(text: str) -> int:
    """Return the ms since 1970 of a time in one of the forms of ``TIMES``. Raises ``ValueError`` for a text in another form."""
    from rocketmq_spark.options.parsing import duration, timestamp

    stripped_text = text.strip()
    if re.fullmatch(r"[\d.]{1,12}\s*[a-z]+", stripped_text):
        # The result is never below 0, because brokers fail for times that do not fit into 64 bits.
        return max(0, round((time.time() - duration(stripped_text)) * 1000))
    if re.fullmatch(r"@\d{1,18}", stripped_text):
        return int(stripped_text[1:])
    if stripped_text.isdecimal():  # ambiguous: it could be an offset, seconds or milliseconds
        raise ValueError(f"a time; @{stripped_text} is one in milliseconds since 1970")
    try:
        return timestamp(stripped_text)
    except ValueError as e:
        raise ValueError(f"a time: {TIMES}") from e


def start_or_time(text: str) -> str | int:
    """Return ``latest`` or ``earliest`` as it is, and another text as a time in ms since 1970."""
    word = text.strip().lower()
    if word in ("latest", "earliest"):
        return word
    try:
        return time_ms(text)
    except ValueError as e:
        raise ValueError(f"latest, earliest, or {e}") from None


def time_option(*names: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a click option that passes a time as ms since 1970."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else time_ms(value)
        except ValueError as e:
            raise click.BadParameter(f"{value!r} is not {e}") from e

    return click.option(*names, callback=parse, metavar="TIME", help=help)


def _discard_output() -> None:
    """Discard all further output, including Python's buffers at exit, because the reader of the pipe has ended."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _as_rocketmq_error(error: Exception) -> RocketMQError:
    if isinstance(error, OSError) and error.filename is not None:
        return RocketMQError(f"{error.filename}: {error.strerror}")
    if isinstance(error, ModuleNotFoundError) and (extra_name := extras.extra_with_module(error.name or "")):
        return OptionError(
            f"this command needs {error.name}, which is not installed",
            remedy=f"Install it: {extras.install_command(extra_name)}",
        )
    return RocketMQError(
        f"{type(error).__name__}: {error}", remedy="This error is unexpected: --debug shows the stack trace"
    )


# For each command, by name: the text in ``--help``, and the module and the function of the command.
COMMANDS = {
    "demo": ("Run a stream, kill Spark in between, and count: two minutes.", "demo.command:demo"),
    "broker": ("Start and stop a real RocketMQ on this machine.", "broker:broker"),
    "topic": ("Create, list, describe, update, widen, shrink and delete topics.", "topic:topic"),
    "group": ("List, describe and delete consumer groups.", "group:group"),
    "cluster": ("Show the brokers of a cluster.", "cluster:cluster"),
    "message": ("Show stored messages by id, by key and by time.", "message:message"),
    "user": ("List, set and delete users (ACL 2.0).", "cluster:user"),
    "policy": ("List, set and delete policies: what users may do (ACL 2.0).", "cluster:policy"),
    "produce": ("Send lines of text, or generated orders, to a topic.", "produce:produce"),
    "tail": ("Show the messages of a topic as they arrive.", "tail:tail"),
    "consume": ("Consume messages of a topic as a group, as lines of JSON.", "tail:consume"),
    "copy": ("Copy messages to another topic or cluster.", "copy:copy"),
    "doctor": ("Diagnose problems and suggest fixes.", "doctor.command:doctor"),
    "lag": ("Show how far a consumer group or a query is behind.", "lag:lag"),
    "offsets": ("Show or reset the offsets of a consumer group.", "group:offsets"),
    "checkpoint": ("Inspect and rewind the checkpoint of a query.", "checkpoint:checkpoint"),
    "spool": ("Inspect, send or export messages that producers could not send.", "spool:spool"),
    "delay": ("Deliver messages after delays of any length.", "spool:delay"),
    "environment": ("Show which environments write and read each queue of a topic.", "topic:environment"),
    "port": ("List what of a program for Kafka changes.", "port:port"),
    "help": ("Show a page of the documentation, an option or an error.", "command:help"),
    "dlq": ("Inspect and resend the dead letters of a consumer group.", "message:dlq"),
}


class _LazyGroup(SuggestingGroup):
    """A group whose commands are imported when they are used. The help of the group imports no command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][1].partition(":")
        command = getattr(importlib.import_module(f"rocketmq_spark.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rocketmq_spark.__version__, prog_name="rocketmq-spark")
def app() -> None:
    """Apache RocketMQ for PySpark: a demo, a local broker, and tools for topics, messages, groups and queries."""


_PACKAGE = Path(rocketmq_spark.__file__).parent
# The folder of the pages in a wheel, and the folder in a clone.
_PAGE_FOLDERS = (_PACKAGE / "pages", _PACKAGE.parent / "docs")
_RECIPE_PREFIX = "how-to/"
# Pages whose tables have a row for each error, option or metric.
_PAGES_WITH_TABLES = ("errors", "options", "metrics")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)  # a page may begin with this block
_CELL_SEPARATOR = re.compile(r"(?<!\\)\|")


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
        rows = [{"page": name, "title": _page_title(_page_text(path))} for name, path in pages.items()]
        output.rows({"page": "PAGE", "title": "TITLE"}, rows)
        return
    name = topic.lower().removeprefix("docs/").removesuffix(".md")
    page = pages.get(name) or pages.get(_RECIPE_PREFIX + name)
    if page is not None:
        text = _page_text(page)
        output.item({"page": name, "text": text}, "") if output.is_for_programs else _print_markdown(text)
        return
    row_by_name = {
        name.lower(): (name, row)
        for page_name in _PAGES_WITH_TABLES
        for name, row in _rows_by_name(_page_text(pages[page_name]))
    }
    command = app.get_command(ctx, topic)
    if topic.lower() in row_by_name:
        _, row = row_by_name[topic.lower()]
        output.item(row, *(f"{heading}: {cell}" for heading, cell in row.items()))
    if command is not None:  # a command is shown in addition to an option of the same name
        text = command.get_help(click.Context(command, parent=ctx.parent, info_name=topic))
        output.item({"command": topic, "text": text}, *text.split("\n"))
    if command is not None or topic.lower() in row_by_name:
        return
    similar_names = difflib.get_close_matches(topic.lower(), [*pages, *row_by_name], n=3, cutoff=0.7)
    hint = (
        f"Did you mean {' or '.join(row_by_name[name][0] if name in row_by_name else name for name in similar_names)}? "
        if similar_names
        else ""
    )
    commands = [name for name, (text, _) in COMMANDS.items() if topic.lower() in re.findall(r"\w+", text.lower())]
    if commands:
        hint = f"See {' or '.join(f'rocketmq-spark help {name}' for name in commands[:3])}. "
    raise NotFound(f"there is no page, option or error {topic!r}", remedy=f"{hint}All pages: rocketmq-spark help")


def _pages() -> dict[str, Path]:
    """Return the pages by name. The pages of how-to/ are the last."""
    for folder in _PAGE_FOLDERS:
        if (folder / "options.md").is_file():
            pages = {str(path.relative_to(folder).with_suffix("")): path for path in folder.rglob("*.md")}
            return {name: pages[name] for name in sorted(pages, key=lambda name: ("/" in name, name))}
    raise RocketMQError("this installation has no pages", remedy="Install the wheel of rocketmq-spark again")


def _page_text(page: Path) -> str:
    return _FRONT_MATTER.sub("", page.read_text(encoding="utf-8"))


def _page_title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def _rows_by_name(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return pairs of a name in the first cell of a table's row, and this row. A row with several names is in several pairs."""
    named_rows: list[tuple[str, dict[str, str]]] = []
    headings: list[str] = []
    for line in text.split("\n"):
        cells = (
            [cell.strip() for cell in _CELL_SEPARATOR.split(line.strip().strip("|"))] if line.startswith("|") else []
        )
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        else:
            row = dict(zip(headings, (cell.replace("`", "").replace("\\|", "|") for cell in cells), strict=False))
            named_rows += [(name, row) for name in re.findall(r"`([^`]+)`", cells[0])]
    return named_rows


def _print_markdown(text: str) -> None:
    """Print Markdown formatted on a terminal, and unchanged elsewhere."""
    width = width_of(sys.stdout)
    if width is None:
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(width, 120)).print(Markdown(text, hyperlinks=False))
