"""``rocketmq-spark tail``: the messages of a topic, in the order in which they were stored."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

import click

from rocketmq_spark.base.clock import utc_text
from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output, shown

if TYPE_CHECKING:
    from rocketmq_spark.cli.reading import TopicReader
    from rocketmq_spark.model import OffsetRange, ReceivedMessage
    from rocketmq_spark.pull.answers import Cause


# So much of a message that cannot be decoded is shown on its line; --json has all of it.
_RAW_BYTES = 40


def _begin(ctx: click.Context, param: click.Parameter, value: str | None) -> str | int | datetime | None:
    """``earliest``, ``latest``, an offset as an int, or a moment."""
    text = (value or "").strip()
    if value is None or text in ("earliest", "latest"):
        return text or None
    if text.isdigit():
        return int(text)
    try:
        if text.startswith("@"):
            return datetime.fromtimestamp(int(text[1:]) / 1000, UTC)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as e:
        raise click.BadParameter(f"{text!r} is not earliest, latest, an offset, an ISO time or @milliseconds") from e
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _tags(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from rocketmq_spark.wire.properties import parse_subscription

    try:
        parse_subscription(value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e
    return value


@click.command(cls=CliCommand)
@click.argument("topic")
@click.option(
    "--from",
    "begin",
    callback=_begin,
    metavar="WHERE",
    help="earliest, latest, an offset (in every queue), or a time: 2026-01-31T12:00:00Z (UTC without a zone), "
    "@1769860800000 (milliseconds). [default: latest; with --no-follow earliest]",
)
@click.option("--tags", callback=_tags, help="Only messages with one of these tags: 'a || b'.")
@click.option("--count", type=click.IntRange(1), help="Stop after this many messages.")
@click.option("--follow/--no-follow", default=True, help="Wait for new messages, or stop at the end. [default: follow]")
@connected
@click.pass_obj
def tail(
    output: Output,
    target: Target,
    topic: str,
    begin: str | int | datetime | None,
    tags: str | None,
    count: int | None,
    follow: bool,
) -> None:
    """Show the messages of TOPIC, oldest first, and then new ones as they come."""
    from rocketmq_spark.cli.reading import TopicReader

    def lost(part: OffsetRange, cause: Cause) -> None:
        output.note(f"{part.size} messages of {part.queue} from offset {part.start} are gone: {cause.value}")

    reader = TopicReader(target.options(), topic, lost, tags)
    if begin is None:
        begin = "latest" if follow else "earliest"
    _seek(reader, begin)
    for message in islice(reader.messages(follow), count):
        output.item(document(message), line(message))


def _seek(reader: TopicReader, begin: str | int | datetime) -> None:
    from rocketmq_spark.cli import reading

    if isinstance(begin, datetime):
        reader.seek_time(int(begin.timestamp() * 1000))
    elif isinstance(begin, int):
        reader.seek(reading.at_offset(begin))
    else:
        reader.seek(reading.earliest if begin == "earliest" else reading.latest)


def document(message: ReceivedMessage) -> dict[str, object]:
    """A message as the source's columns name its parts. A body that is no UTF-8 text comes as ``bodyBase64``; so does
    one that cannot be decoded, as it is stored, with its flags and the reason."""
    bad = message.decode_error is not None
    text = None if bad else _text(message.body)
    body = {"bodyBase64": base64.b64encode(message.body).decode()} if text is None else {"body": text}
    return {
        "topic": message.topic,
        "brokerName": message.broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        **body,
        "tags": message.tags,
        "keys": message.keys,
        "bornTimestamp": utc_text(message.born_timestamp),
        "storeTimestamp": utc_text(message.store_timestamp),
        "msgId": message.msg_id,
        "properties": _own(message),
        **({"sysFlag": message.sys_flag, "decodeError": message.decode_error} if bad else {}),
    }


def line(message: ReceivedMessage) -> str:
    """A message on one line: when, where, what it is marked with, what it says."""
    marks = [f"tags={message.tags}"] if message.tags else []
    marks += [f"keys={','.join(message.keys)}"] if message.keys else []
    marks += [f"{name}={value}" for name, value in _own(message).items()]
    bad = message.decode_error is not None
    marks += [f"sysFlag={message.sys_flag:#x}"] if bad else []
    text = f"<cannot be decoded: {message.decode_error}> {message.body[:_RAW_BYTES]!r}" if bad else _text(message.body)
    said = f"<{len(message.body)} bytes>" if text is None else text
    place = f"{message.broker_name}/{message.queue_id}@{message.queue_offset}"
    return shown("  ".join([utc_text(message.store_timestamp), place, *([" ".join(marks)] if marks else []), said]))


def _own(message: ReceivedMessage) -> dict[str, str]:
    """The user's properties, without RocketMQ's."""
    from rocketmq_spark.base.codes import RESERVED_PROPERTIES

    return {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
