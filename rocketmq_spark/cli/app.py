"""The tree of commands. Each group's file is imported only when one of its commands is asked for."""

from __future__ import annotations

import importlib

import click

import rocketmq_spark
from rocketmq_spark.cli.command import Suggesting

# What the first page of help says, and where the command is.
_COMMANDS = {
    "demo": ("Run a stream from a broker to Spark and back, in about a minute.", "demo.play:demo"),
    "broker": ("Start and stop a real RocketMQ on this machine.", "broker:broker"),
    "topic": ("Create, list, describe, widen, shrink and delete topics.", "topic:topic"),
    "group": ("List, describe and delete consumer groups.", "group:group"),
    "cluster": ("Show the brokers of a cluster.", "cluster:cluster"),
    "message": ("Show stored messages by id and by key.", "message:message"),
    "user": ("List, set and delete users (ACL 2.0).", "access:user"),
    "policy": ("List, set and delete what users may do (ACL 2.0).", "access:policy"),
    "produce": ("Send lines of text, or generated orders, to a topic.", "produce:produce"),
    "tail": ("Show the messages of a topic as they arrive.", "tail:tail"),
    "consume": ("Consume messages of a topic as a group, as lines of JSON.", "consume:consume"),
    "copy": ("Copy messages to another topic or cluster.", "copy:copy"),
    "doctor": ("Diagnose problems and suggest fixes.", "doctor.command:doctor"),
    "lag": ("Show how far a consumer group or a query is behind.", "lag:lag"),
    "offsets": ("Show or reset the offsets of a consumer group.", "offsets:offsets"),
    "checkpoint": ("Inspect and rewind the checkpoint of a query.", "checkpoint:checkpoint"),
    "spool": ("Inspect, send or export messages that producers could not send.", "spool:spool"),
    "delay": ("Deliver messages after delays of any length.", "delay:delay"),
    "environment": ("Show which environments write and read each queue of a topic.", "environment:environment"),
    "dlq": ("Inspect and resend the dead letters of a consumer group.", "dlq:dlq"),
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
    """Apache RocketMQ for PySpark: a demo, a local broker, and tools for topics, messages, groups and queries."""
