"""``rocketmq-spark tail`` and ``consume``: ``tail`` shows messages in the order in which they were stored. ``consume`` reads
them as a member of a consumer group, and prints JSON.
"""

from __future__ import annotations

import base64
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rocketmq_spark.base.clock import utc_text
from rocketmq_spark.base.logs import escaped
from rocketmq_spark.base.process import on_signals
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.command import TIMES, CliCommand, SendingCommand, start_or_time, time_ms
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.numbers import FloatRange, IntRange
from rocketmq_spark.cli.output import Json, Output
from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rocketmq_spark.cli.topic_reader import TopicReader
    from rocketmq_spark.consumer.pull import PolledMessages
    from rocketmq_spark.model import MessageQueue, OffsetRange, ReceivedMessage
    from rocketmq_spark.pull.outcomes import Cause
    from rocketmq_spark.session.consumers import PullConsumer


# The maximum number of bytes of an undecodable message in a line of text. With --json, all bytes are printed.
_MAX_UNDECODABLE_BYTES = 40


class StoredAt(NamedTuple):
    """A start position: the first message that was stored at or after a time."""

    time_ms: int


StartPosition = str | int | StoredAt | dict["MessageQueue", int]


def _parse_queue_offsets(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> dict[MessageQueue, int] | None:
    """Parse offsets by queue, given as JSON."""
    from rocketmq_spark.options.parsing import queue_offsets

    try:
        return None if value is None else queue_offsets(value)
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not {e}") from e


def _parse_start(ctx: click.Context, param: click.Parameter, value: str | None) -> StartPosition | None:
    """Parse ``earliest``, ``latest``, an offset, offsets by queue as JSON, or a time."""
    text = (value or "").strip()
    if value is None or text in ("earliest", "latest"):
        return text or None
    if text.startswith("{"):
        return _parse_queue_offsets(ctx, param, text)
    if text.isdecimal():
        return int(text)
    try:
        return StoredAt(time_ms(text))
    except ValueError as e:
        raise click.BadParameter(f"{text!r} is not earliest, latest, an offset, JSON, or a time: {TIMES}") from e


def _check_tags(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from rocketmq_spark.wire.properties import parse_user_subscription

    try:
        parse_user_subscription(value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e
    return value


@click.command(cls=CliCommand)
@click.argument("topic")
@click.option(
    "--from",
    "begin",
    callback=_parse_start,
    metavar="WHERE",
    help="earliest, latest, an offset (in every queue), JSON as for startingOffsets (only the queues that it names), or a time: "
    f"{TIMES}. [default: latest; with --no-follow earliest]",
)
@click.option(
    "--to",
    "end",
    callback=_parse_queue_offsets,
    metavar="JSON",
    help="Stop before these offsets of queues, and do not wait for new messages. Requires --from with JSON that names these "
    "queues, too.",
)
@click.option("--tags", callback=_check_tags, help="Only messages with one of these tags: 'a || b'.")
@click.option("--count", type=IntRange(1), help="Stop after this many messages.")
@click.option("--follow/--no-follow", default=True, help="Wait for new messages, or stop at the end. [default: follow]")
@with_connection_options
@click.pass_obj
def tail(
    output: Output,
    target: Target,
    topic: str,
    begin: StartPosition | None,
    end: dict[MessageQueue, int] | None,
    tags: str | None,
    count: int | None,
    follow: bool,
) -> None:
    """Show new messages of TOPIC as they arrive.

    With --from or --no-follow, show stored messages first, the oldest first.
    """
    from rocketmq_spark.cli.topic_reader import TopicReader

    def warn_of_loss(lost_range: OffsetRange, cause: Cause) -> None:
        output.warning(
            f"{lost_range.size} messages of {lost_range.queue} from offset {lost_range.start} are gone: {cause.value}"
        )

    if end is not None and not (isinstance(begin, dict) and end.keys() <= begin.keys()):
        raise click.UsageError("--to needs --from as JSON that names all queues of --to, too")
    reader = TopicReader(target.options(), topic, warn_of_loss, tags)
    if isinstance(begin, dict):
        reader.seek_offsets(begin, end)
        follow = follow and end is None
    elif begin is None:
        begin = "latest" if follow else "earliest"
    if not isinstance(begin, dict):
        _seek(reader, begin)
    if follow:
        output.note(f"Waiting for messages of {topic} until Ctrl-C")
    is_empty = True
    for message in islice(reader.messages(follow), count):
        output.item(message_document(message), message_line(message))
        is_empty = False
    if is_empty:
        tags_text = " with these tags" if tags is not None else ""
        position_text = "" if begin == "earliest" else " from that position on"
        output.note(f"{topic} has no messages{tags_text}{position_text}")


def _seek(reader: TopicReader, begin: StartPosition) -> None:
    from rocketmq_spark.cli import topic_reader

    if isinstance(begin, StoredAt):
        reader.seek_time(begin.time_ms)
    elif isinstance(begin, int):
        reader.seek(topic_reader.at_offset(begin))
    else:
        reader.seek(topic_reader.earliest if begin == "earliest" else topic_reader.latest)


def message_document(message: ReceivedMessage) -> dict[str, object]:
    """Return a message as JSON values, with the names of the source's columns. The body is in ``bodyBase64`` if it is not
    UTF-8. For a message that cannot be decoded, ``bodyBase64`` is the stored body, and ``sysFlag`` and ``decodeError`` are
    added.
    """
    is_undecodable = message.decode_error is not None
    text = None if is_undecodable else _utf8_text(message.body)
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
        "properties": _user_properties(message),
        **({"sysFlag": message.sys_flag, "decodeError": message.decode_error} if is_undecodable else {}),
    }


def message_line(message: ReceivedMessage) -> str:
    """Return a message as one line: store time, queue and offset, tags, keys and properties, body."""
    fields = [f"tags={message.tags}"] if message.tags else []
    fields += [f"keys={','.join(message.keys)}"] if message.keys else []
    fields += [f"{name}={value}" for name, value in _user_properties(message).items()]
    is_undecodable = message.decode_error is not None
    fields += [f"sysFlag={message.sys_flag:#x}"] if is_undecodable else []
    text = (
        f"<cannot be decoded: {message.decode_error}> {message.body[:_MAX_UNDECODABLE_BYTES]!r}"
        if is_undecodable
        else _utf8_text(message.body)
    )
    body_text = f"<{len(message.body)} bytes>" if text is None else text
    place_text = f"{message.broker_name}/{message.queue_id}@{message.queue_offset}"
    return escaped(
        "  ".join([utc_text(message.store_timestamp), place_text, *([" ".join(fields)] if fields else []), body_text])
    )


def _user_properties(message: ReceivedMessage) -> dict[str, str]:
    """Return the properties that users have set, without RocketMQ's own."""
    from rocketmq_spark.base.codes import RESERVED_PROPERTIES

    return {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}


def _utf8_text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


# The longest wait of one poll. Printed messages are committed before the next poll.
_POLL_TIMEOUT_S = 0.5


def _parse_group_start(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Parse ``--from``: ``earliest``, ``latest`` or a time. Returns a value of option consumeFromWhere."""
    try:
        return str(start_or_time(value))
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not {e}") from e


def consumer_options(begin: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of commands that consume as a group. ``begin`` is the default of ``--from``."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--count", type=IntRange(1), help="Stop after this many messages."),
            click.option(
                "--from",
                "begin",
                default=begin,
                show_default=True,
                callback=_parse_group_start,
                metavar="WHERE",
                help=f"Where to begin in a queue without an offset of the group: earliest, latest, or a time: {TIMES}.",
            ),
            click.option("--sql", help="Only messages for which this SQL92 expression is true."),
            click.option("--tags", help="Only messages with one of these tags: 'a || b'."),
            click.option(
                "--group", required=True, help="The consumer group. Reading continues at its committed offsets."
            ),
        ):
            function = option(function)
        return function

    return add


def subscribed_consumer(target: Target, topic: str, arguments: dict[str, Any]) -> PullConsumer:
    """Return a consumer of the group that is subscribed to the topic and does not commit automatically."""
    from rocketmq_spark.session.consumers import PullConsumer

    _store_start_offsets(target, topic, arguments)
    given_options = {
        "consume_from_where": arguments["begin"],
        **target.settings(),
        "group": arguments["group"],
        "auto_commit": False,
    }
    consumer = PullConsumer(**given_options)
    try:
        consumer.subscribe(topic, arguments["tags"], arguments["sql"])
    except BaseException:
        consumer.close()
        raise
    return consumer


def _store_start_offsets(target: Target, topic: str, arguments: dict[str, Any]) -> None:
    """Store the start offsets of queues in which the group has no offset, before anything is read.

    Without stored offsets, a command that follows a killed command could start at a later offset and miss messages. Nothing is
    stored if the group has members, because these members have positions already. For a topic that does not exist, the error
    suggests similar names.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group
    from rocketmq_spark.options.parsing import consume_from_where
    from rocketmq_spark.queues.environment import environment_of

    source_target = target.for_role("batch source")
    client, group_in_environment = source_target.client(), own_group(target, arguments["group"])
    environment = environment_of(source_target.options())
    changes = groups.offset_changes(
        client, group_in_environment, [topic], consume_from_where(arguments["begin"]), environment, "--from"
    )
    new_offsets = {change.queue: change.after for change in changes if change.before is None}
    if new_offsets and not groups.members(client, group_in_environment, [change.queue for change in changes]):
        groups.store_offsets(client, group_in_environment, new_offsets)
        groups.warn_of_unseen_members(client, group_in_environment, new_offsets)


@click.command(cls=SendingCommand)
@click.argument("topic")
@consumer_options("latest")
@click.option("--idle", "idle_s", type=FloatRange(0), help="Stop after this many seconds without a message.")
@with_connection_options
@click.pass_obj
def consume(output: Output, /, target: Target, topic: str, idle_s: float | None, **arguments: Any) -> None:
    """Consume messages of TOPIC as a member of a group, until --count, --idle or Ctrl-C. Prints JSON, one object per line.

    The group shares the queues among its members. Offsets are committed when lines are written, so a message is printed at
    least once: if the command is killed, the last lines may come again. Lines that the reader of a pipe did not read are not
    printed again; use --count instead of `| head`.
    """
    from rocketmq_spark.consumer.pull import PolledMessages

    if sys.stdout is None:
        raise OptionError("standard output is closed: messages would be consumed and not printed")
    json_output, remaining_count, stop_latch = Json(), arguments["count"], Latch()
    with (
        subscribed_consumer(target, topic, arguments) as consumer,
        on_signals(stop_latch.set, signal.SIGINT, signal.SIGTERM),
    ):
        last_message_s = time.monotonic()
        while not stop_latch.is_set() and (remaining_count is None or remaining_count > 0):
            polled_messages = PolledMessages(
                consumer, _POLL_TIMEOUT_S if idle_s is None else min(_POLL_TIMEOUT_S, idle_s)
            )
            messages, now_s = polled_messages.messages, time.monotonic()
            _print(json_output, consumer, polled_messages, remaining_count)
            remaining_count = None if remaining_count is None else remaining_count - len(messages)
            if not messages and idle_s is not None and now_s - last_message_s >= idle_s:
                return
            last_message_s = now_s if messages else last_message_s
    if stop_latch.is_set():
        raise KeyboardInterrupt


def _print(output: Json, consumer: PullConsumer, polled_messages: PolledMessages, limit: int | None) -> None:
    """Print at most ``limit`` messages of one queue, and commit the positions of all queues, even of queues without messages.

    If the pipe closes, the offsets of the messages that were written before are committed, too.
    """
    try:
        for count, message in enumerate(polled_messages.messages[:limit], 1):
            output.item({**message_document(message), "reconsumeTimes": message.reconsume_times}, "")
            polled_messages.mark_finished(count)
    finally:
        consumer.commit()
