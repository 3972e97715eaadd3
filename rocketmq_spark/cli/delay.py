"""``rocketmq-spark delay``: a node of the service for delays of any length (docs/delay.md)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from rocketmq_spark.base.lifecycle import on_signals
from rocketmq_spark.cli.command import CliGroup
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output
from rocketmq_spark.delay import DEAD_TOPIC, INNER_TOPIC


@click.group(cls=CliGroup)
def delay() -> None:
    """Deliver messages after delays that the timers of brokers do not support."""


@delay.command()
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="Folder of this node alone; created if missing."
)
@click.option(
    "--group", default="rocketmq_delay", show_default=True, help="Consumer group; nodes of one group share the load."
)
@click.option(
    "--topic",
    "topics",
    metavar="PATTERN",
    multiple=True,
    required=True,
    help="A topic that messages may be delivered to, or a pattern such as 'orders-*' (may be repeated). '*' means all but"
    " system topics.",
)
@click.option("--inner-topic", default=INNER_TOPIC, show_default=True, help="Topic in which messages wait.")
@click.option("--dead-topic", default=DEAD_TOPIC, show_default=True, help="Topic for messages that cannot be read.")
@click.option("--dead", is_flag=True, help="Also send messages that were given up.")
@connected
@click.pass_obj
def serve(
    output: Output,
    target: Target,
    data: Path,
    group: str,
    topics: tuple[str, ...],
    inner_topic: str,
    dead_topic: str,
    dead: bool,
) -> None:
    """Hold messages of dmq_inner_topic in DATA and send them when they are due, until Ctrl-C or SIGTERM."""
    from rocketmq_spark.delay.node import NodeSettings, open_node

    over = threading.Event()
    with on_signals(over.set, signal.SIGINT, signal.SIGTERM):
        place = NodeSettings(data, inner_topic, dead_topic, topics=topics, dead=dead)
        node = open_node(place, **{**target.settings(), "group": group})
        begun = {"group": group, "topic": inner_topic, "data": str(data), "waiting": node.waiting}
        output.item(begun, f"group {group} holds messages of {inner_topic} in {data}; {node.waiting} wait now")
        node.run(over)
    row = {"stored": node.stored, "sent": node.sent, "waiting": node.waiting}
    output.item(row, f"{node.stored} messages stored, {node.sent} sent, {node.waiting} wait")
