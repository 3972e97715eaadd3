"""The tree of commands. Each group's file is imported only when one of its commands is asked for."""

from __future__ import annotations

import importlib

import click

import rocketmq_spark
from rocketmq_spark.cli.command import Suggesting

# What the first page of help says, and where the command is.
_COMMANDS = {
    "demo": ("A stream from broker to Spark and back, in about a minute.", "demo.play:demo"),
    "broker": ("A real RocketMQ on this machine, in the background.", "broker:broker"),
    "topic": ("Create, list, describe and delete topics.", "topic:topic"),
    "produce": ("Send lines of text, or generated orders, to a topic.", "produce:produce"),
    "tail": ("Show the messages of a topic as they come.", "tail:tail"),
    "doctor": ("Diagnose problems and suggest fixes.", "doctor.command:doctor"),
    "lag": ("How far a consumer group or a query is behind.", "lag:lag"),
    "offsets": ("Show and set the offsets of a consumer group.", "offsets:offsets"),
    "checkpoint": ("Look into a query's checkpoint, and take it back.", "checkpoint:checkpoint"),
    "spool": ("Look into what producers could not send, and send or export it.", "spool:spool"),
    "delay": ("A service that delivers messages after delays of any length.", "delay:delay"),
    "environment": ("See which environment writes and reads which queue of a topic.", "environment:environment"),
    "dlq": ("Look into dead letters of consumer groups, and send them again.", "dlq:dlq"),
}


class _Lazy(Suggesting):
    """A group whose commands are imported when they are used; its help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][1].partition(":")
        command = getattr(importlib.import_module(f"rocketmq_spark.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _) in _COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rocketmq_spark.__version__, prog_name="rocketmq-spark")
def app() -> None:
    """Apache RocketMQ for PySpark: a demo, a local broker, and small tools for topics and messages."""
