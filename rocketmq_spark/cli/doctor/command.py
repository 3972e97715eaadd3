"""``rocketmq-spark doctor``: one line for each check, and what to do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output, shown, width_of, wrapped

if TYPE_CHECKING:
    from rocketmq_spark.cli.doctor.findings import Finding

_INDENT = 8


@click.command(cls=CliCommand)
@click.argument("server", metavar="[NAME_SERVER]", required=False)
@click.option("--topic", "topics", multiple=True, help="A topic that is read or written (may be repeated).")
@click.option("--group", metavar="NAME", help="A consumer group that reads.")
@click.option("--checkpoint", metavar="FOLDER", help="The checkpointLocation of a query that reads.")
@click.option(
    "--proxy-endpoint",
    metavar="HOST:PORT",
    help="The gRPC port of a Proxy, several with ';'; it alone, or beside a name server.",
)
@click.option("--strict", is_flag=True, help="Advice makes the exit code 1, too.")
@connected
@click.pass_obj
@click.pass_context
def doctor(
    ctx: click.Context,
    output: Output,
    /,
    target: Target,
    server: str | None,
    topics: tuple[str, ...],
    proxy_endpoint: str | None,
    strict: bool,
    **readers: str | None,
) -> None:
    """Look for what keeps a cluster, a topic or a reader from working, and say how to mend it.

    Nothing is changed, and nothing is sent that a broker would keep. Exit code 0: nothing is broken; 1: something is; 2: wrong
    usage.
    """
    from rocketmq_spark.cli.doctor.examine import Subject, examine
    from rocketmq_spark.cli.doctor.findings import Level, code

    if server is not None:
        target = replace(target, given={**target.given, "name_server": server})
    if proxy_endpoint is not None:
        target = replace(target, given={**target.given, "proxy_endpoint": proxy_endpoint})
    width = width_of(sys.stdout)
    found = []
    for finding in examine(target, Subject(topics, readers["group"], readers["checkpoint"])):
        found.append(finding)
        told = {"check": finding.check, "level": finding.level.value, "found": finding.found, "remedy": finding.remedy}
        output.item(told, "\n".join(lines(finding, width)))
    counts = {level: sum(one.level is level for one in found) for level in Level}
    output.note(f"{counts[Level.BROKEN]} broken, {counts[Level.ADVICE]} with advice, {counts[Level.OK]} well")
    ctx.exit(code(found, strict))


def lines(finding: Finding, width: int | None) -> list[str]:
    """One line; where a terminal is narrower, more of them, the others indented."""
    text = f"{finding.level.value:<{_INDENT}}{finding.check}: {finding.found}"
    text += f". {finding.remedy}" if finding.remedy else ""
    return wrapped(shown(text), width, _INDENT)
