"""``rocketmq-spark port``: lists the lines of a Kafka program that must change."""

from __future__ import annotations

from pathlib import Path

import click

from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.kafka_lines import PARSE_ERRORS, port_report
from rocketmq_spark.cli.output import Output

_SEARCHED_NOTE = "{} searched as text: names and values that are computed elsewhere are not found"
# Differences that no line of the program shows.
_CHECKLIST = (
    "Options that are not listed keep their names and values; columns stay. Also check:",
    "- null or empty values (tombstones): the sink needs emptyBodies=mark",
    "- headers with a null value are left out; repeated headers of a row: the last one is stored",
    "- topics must exist: rocketmq-spark topic create NAME",
    "- two streams in one program: register(spark) first; with option 'group', one load() for each query",
    "- a column partition: the number of a queue, in order of broker name and queue id",
    "- names of topics with dots in computed values: RocketMQ's names have _ in their place",
    "- startingTimestamp is the time when the broker stored the message",
    "All differences: rocketmq-spark help coming-from-kafka",
)


@click.command(cls=CliCommand)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def port(ctx: click.Context, file: Path) -> None:
    """List the lines of a Spark program that change from Kafka to RocketMQ, and what replaces them.

    FILE is a Python program, a notebook, or a text in another language, such as Scala, SQL or a shell script. The command reads
    the file and does not run it. Python is parsed; other languages are searched as text, which finds less. Formats that are
    computed, and texts "kafka" that may become a format, are listed to be checked. Lines of Python with columns of Kafka's source
    and sink are listed, too: with kafkaColumns=true, these lines stay. In a program for RocketMQ, formats, options, settings
    and names of topics with dots that are left of Kafka are listed, columns are not. Exit codes: 0 if there is nothing to change
    or to check, 1 if there is, 2 if the file cannot be read or parsed.
    """
    output: Output = ctx.obj
    try:
        lines, searched_parts = port_report(file.name, file.read_bytes())
    except OSError as e:
        raise click.UsageError(f"{file} cannot be read: {e}") from e
    except PARSE_ERRORS as e:
        raise click.UsageError(f"{file} cannot be parsed: {str(e) or 'it is nested too deeply'}") from e
    rows = [{"line": finding.where, "kafka": finding.kafka, "rocketmq": finding.replacement} for finding in lines]
    if rows:
        output.rows({"line": "LINE", "kafka": "KAFKA", "rocketmq": "ROCKETMQ"}, rows)
    if searched_parts:
        output.note(
            _SEARCHED_NOTE.format(f"{', '.join(searched_parts)} {'were' if len(searched_parts) > 1 else 'was'}")
        )
    is_spark_program = any(not finding.replacement.startswith("rocketmq_spark.") for finding in lines)
    for line in _CHECKLIST if is_spark_program else _CHECKLIST[-1:] if rows else (f"{file}: nothing to change",):
        output.note(line)
    ctx.exit(1 if rows else 0)
