"""``rocketmq-spark message``: stored messages by id and by key."""

from __future__ import annotations

import click

from rocketmq_spark.base.clock import utc_text
from rocketmq_spark.cli.command import CliGroup
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.dlq import time_option
from rocketmq_spark.cli.output import Output
from rocketmq_spark.cli.tail import document, line


@click.group(cls=CliGroup)
def message() -> None:
    """Show stored messages by their ids and keys."""


@message.command()
@click.argument("message_id", metavar="ID")
@click.option("--topic", help="Its topic. Required for an id that the producer gave, and by brokers with ACL.")
@connected
@click.pass_obj
def get(output: Output, target: Target, message_id: str, topic: str | None) -> None:
    """Show one message, by its offset message id, or with --topic also by the id that its producer gave it."""
    from rocketmq_spark.admin import topics

    one = topics.message_by_id(target.client(), message_id, topic)
    row = {
        **document(one),
        "offsetMsgId": one.offset_msg_id,
        "bornHost": one.born_host,
        "storeHost": one.store_host,
        "reconsumeTimes": one.reconsume_times,
        "storeSize": one.store_size,
        "allProperties": dict(one.properties),
    }
    sent = f"sent {utc_text(one.born_timestamp)} from {one.born_host}, id {one.msg_id}, {one.store_size} bytes stored"
    output.item(row, f"{one.topic}  {line(one)}\n{sent}")


@message.command()
@click.option("--topic", required=True, help="The topic to look in.")
@click.option("--key", required=True, help="A business key, or the id that the producer gave.")
@time_option("--since", "Only messages stored at or after this time: ISO-8601 or ms.")
@time_option("--until", "Only messages stored until this time: ISO-8601 or ms.")
@click.option(
    "--limit",
    type=click.IntRange(1, 64),
    default=32,
    show_default=True,
    help="The newest so many of each broker; brokers look no further.",
)
@connected
@click.pass_obj
def find(
    output: Output, target: Target, topic: str, key: str, since: int | None, until: int | None, limit: int
) -> None:
    """Show the messages of a topic that have a key, oldest first."""
    from rocketmq_spark.admin import topics

    found = topics.messages_by_key(target.client(), topic, key, since, until, limit)
    for one in found:
        output.item(document(one), line(one))
    output.note(f"{len(found)} messages with key {key}")
