"""``rocketmq-spark dlq``: what a consumer group could not consume, and back to its topic with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import Group, Sending
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output
from rocketmq_spark.cli.tail import document, line

if TYPE_CHECKING:
    from rocketmq_spark.model import OffsetRange, ReceivedMessage
    from rocketmq_spark.pull.verdict import Cause


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which dead letters: those with one of these keys or message ids, that died in this time (ms since 1970)."""

    keys: frozenset[str]
    since_ms: int | None
    until_ms: int | None

    def __call__(self, message: ReceivedMessage) -> bool:
        if self.keys and not self.keys & {message.msg_id, *message.keys}:
            return False
        return (self.since_ms or 0) <= message.store_timestamp and (
            self.until_ms is None or message.store_timestamp < self.until_ms
        )


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from rocketmq_spark.parsing import timestamp

    try:
        return None if value is None else timestamp(value)
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not {e}") from e


def _chosen(function: Callable[..., None]) -> Callable[..., None]:
    """The options that choose letters."""
    for add in (
        click.option("--until", callback=_time, metavar="TIME", help="That died before this time."),
        click.option(
            "--since", callback=_time, metavar="TIME", help="That died at or after this time: ISO-8601 or ms."
        ),
        click.option("--key", "keys", multiple=True, help="With this key or message id (may be repeated)."),
    ):
        function = add(function)
    return function


@click.group(cls=Group)
def dlq() -> None:
    """Look into the dead letters of a consumer group, and send them to their topic again."""


@dlq.command()
@click.argument("group")
@_chosen
@connected
@click.pass_obj
def show(
    output: Output, target: Target, group: str, keys: tuple[str, ...], since: int | None, until: int | None
) -> None:
    """The dead letters of GROUP, oldest first."""
    count = 0
    for message in _letters(output, target, group, Wanted(frozenset(keys), since, until)):
        output.item(
            {**document(message), "reconsumeTimes": message.reconsume_times}, f"{message.topic}  {line(message)}"
        )
        count += 1
    output.note(f"{count} dead letters of group {group}")


@dlq.command(cls=Sending)
@click.argument("group")
@_chosen
@click.option("--send", "really", is_flag=True, help="Do send. Without it only what would be sent is said.")
@connected
@click.pass_obj
def resend(
    output: Output,
    target: Target,
    group: str,
    keys: tuple[str, ...],
    since: int | None,
    until: int | None,
    really: bool,
) -> None:
    """Send dead letters of GROUP to their topics again: all groups that read those get them.

    They stay where they are; each is a new message with its tags, keys and properties. One that cannot be decoded, or
    does not say where it came from, is named and left out.
    """
    from rocketmq_spark.codes import DLQ_PREFIX
    from rocketmq_spark.model import Message
    from rocketmq_spark.wire.properties import is_reserved

    sent = 0
    with target.producer() as producer:
        for message in _letters(output, target, group, Wanted(frozenset(keys), since, until)):
            if message.decode_error is not None or message.topic.startswith(DLQ_PREFIX):
                why = message.decode_error or "it has no topic of its own"
                output.note(f"{message.queue} offset {message.queue_offset} is left out: {why}")
                continue
            told: dict[str, object] = {"topic": message.topic, "msgId": message.msg_id, "sent": really}
            text = f"{message.msg_id} to {message.topic}"
            if really:
                own = {name: value for name, value in message.properties.items() if not is_reserved(name)}
                again = Message(message.topic, message.body, message.tags, message.keys, own, message.flag)
                told["newMsgId"] = producer.send(again).msg_id
                text += f" as {told['newMsgId']}"
            output.item(told, text)
            sent += 1
    output.note(f"{sent} sent" if really else f"{sent} would be sent; --send does it")


def _letters(output: Output, target: Target, group: str, wanted: Wanted) -> Iterator[ReceivedMessage]:
    """With the topics that they came from, in the user's names."""
    from rocketmq_spark import access
    from rocketmq_spark.cli import reading
    from rocketmq_spark.codes import Property
    from rocketmq_spark.errors import RouteNotFound
    from rocketmq_spark.queues.environment import environment_of
    from rocketmq_spark.wire.names import dlq_topic

    def lost(part: OffsetRange, cause: Cause) -> None:
        output.note(f"{part.size} messages of {part.queue} from offset {part.start} are gone: {cause.value}")

    options = target.options()
    environment, scope = environment_of(options), access.scope(options)
    topic = dlq_topic(environment.group(group) if environment is not None else group)
    reader = reading.TopicReader(options, topic, lost)
    try:
        reader.seek(reading.earliest)
    except RouteNotFound:
        output.note(f"Group {group} has no dead letters: there is no topic {scope.on_wire(topic)}")
        return
    for message in filter(wanted, reader.messages()):
        properties = message.properties
        origin = properties.get(Property.RETRY_TOPIC) or properties.get(Property.DLQ_ORIGIN_TOPIC)
        yield replace(message, topic=scope.plain(origin)) if origin else message
