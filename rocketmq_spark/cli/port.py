"""``rocketmq-spark port``: what of a program for Kafka changes."""

from __future__ import annotations

from pathlib import Path

import click

from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.kafka_lines import findings
from rocketmq_spark.cli.output import Output


@click.command(cls=CliCommand)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def port(ctx: click.Context, file: Path) -> None:
    """List the lines of a Spark program that name Kafka, and what replaces them.

    FILE is a Python program, a notebook, or a text in another language, such as Scala, SQL or a shell script. It is read and
    not run. Exit codes: 0 if there is nothing to change, 1 if there is, 2 if the file cannot be read or parsed.
    """
    output: Output = ctx.obj
    try:
        found = findings(file.name, file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as e:
        raise click.UsageError(f"{file} cannot be read: {e}") from e
    rows = [{"line": place.where, "kafka": place.kafka, "rocketmq": place.here} for place in found]
    output.rows({"line": "LINE", "kafka": "KAFKA", "rocketmq": "ROCKETMQ"}, rows)
    if rows:
        output.note("Options of the same names stay. All differences: rocketmq-spark help coming-from-kafka")
    else:
        output.note(f"{file} names nothing of Kafka")
    ctx.exit(1 if rows else 0)
