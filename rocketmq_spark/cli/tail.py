"""``rocketmq-spark tail`` and ``consume``: the messages of a topic, in the order in which they were stored, or as a member of a
consumer group, as lines of JSON.
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
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.numbers import FloatRange, IntRange
from rocketmq_spark.cli.output import Json, Output
from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rocketmq_spark.cli.reading import TopicReader
    from rocketmq_spark.consumer.pull import PolledMessages
    from rocketmq_spark.model import MessageQueue, OffsetRange, ReceivedMessage
    from rocketmq_spark.pull.outcomes import Cause
    from rocketmq_spark.session.consumers import PullConsumer


# So much of a message that cannot be decoded is shown on its line; --json has all of it.
_RAW_BYTES = 40


class StoredAt(NamedTuple):
    """The first message that was stored at or after a time."""

    time_ms: int


Place = str | int | StoredAt | dict["MessageQueue", int]


def _by_queue(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[MessageQueue, int] | None:
    """Offsets by queue, as JSON."""
    from rocketmq_spark.options.parsing import queue_offsets

    try:
        return None if value is None else queue_offsets(value)
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not {e}") from e


def _begin(ctx: click.Context, param: click.Parameter, value: str | None) -> Place | None:
    """``earliest``, ``latest``, an offset as an int, offsets by queue, or a time."""
    text = (value or "").strip()
    if value is None or text in ("earliest", "latest"):
        return text or None
    if text.startswith("{"):
        return _by_queue(ctx, param, text)
    if text.isdecimal():
        return int(text)
    try:
        return StoredAt(time_ms(text))
    except ValueError as e:
        raise click.BadParameter(f"{text!r} is not earliest, latest, an offset, JSON, or a time: {TIMES}") from e


def _tags(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
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
    callback=_begin,
    metavar="WHERE",
    help="earliest, latest, an offset (in every queue), JSON as for startingOffsets (only the queues that it names), or a time: "
    f"{TIMES}. [default: latest; with --no-follow earliest]",
)
@click.option(
    "--to",
    "end",
    callback=_by_queue,
    metavar="JSON",
    help="Stop before these offsets of queues, and do not wait for new messages. Requires --from with JSON that names these "
    "queues, too.",
)
@click.option("--tags", callback=_tags, help="Only messages with one of these tags: 'a || b'.")
@click.option("--count", type=IntRange(1), help="Stop after this many messages.")
@click.option("--follow/--no-follow", default=True, help="Wait for new messages, or stop at the end. [default: follow]")
@connected
@click.pass_obj
def tail(
    output: Output,
    target: Target,
    topic: str,
    begin: Place | None,
    end: dict[MessageQueue, int] | None,
    tags: str | None,
    count: int | None,
    follow: bool,
) -> None:
    """Show new messages of TOPIC as they arrive.

    With --from or --no-follow, show stored messages first, the oldest first.
    """
    from rocketmq_spark.cli.reading import TopicReader

    def lost(part: OffsetRange, cause: Cause) -> None:
        output.warning(f"{part.size} messages of {part.queue} from offset {part.start} are gone: {cause.value}")

    if end is not None and not (isinstance(begin, dict) and end.keys() <= begin.keys()):
        raise click.UsageError("--to needs --from as JSON that names all queues of --to, too")
    reader = TopicReader(target.options(), topic, lost, tags)
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
        output.item(document(message), line(message))
        is_empty = False
    if is_empty:
        which = " with these tags" if tags is not None else ""
        where = "" if begin == "earliest" else " from that position on"
        output.note(f"{topic} has no messages{which}{where}")


def _seek(reader: TopicReader, begin: Place) -> None:
    from rocketmq_spark.cli import reading

    if isinstance(begin, StoredAt):
        reader.seek_time(begin.time_ms)
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
    return escaped("  ".join([utc_text(message.store_timestamp), place, *([" ".join(marks)] if marks else []), said]))


def _own(message: ReceivedMessage) -> dict[str, str]:
    """The user's properties, without RocketMQ's."""
    from rocketmq_spark.base.codes import RESERVED_PROPERTIES

    return {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


# How long one poll waits: what was printed is committed before each.
_POLL_S = 0.5


def start(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Callback of ``--from``: ``earliest``, ``latest`` or a time, as the consumers' option takes it."""
    try:
        return str(start_or_time(value))
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not {e}") from e


def consuming(begin: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of commands that consume as a group, which begin at ``begin`` unless they are asked for another place."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--count", type=IntRange(1), help="Stop after this many messages."),
            click.option(
                "--from",
                "begin",
                default=begin,
                show_default=True,
                callback=start,
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


def subscribed(target: Target, topic: str, how: dict[str, Any]) -> PullConsumer:
    """A member of the group that reads the topic. It commits nothing by itself."""
    from rocketmq_spark.session.consumers import PullConsumer

    _store_start(target, topic, how)
    given = {"consume_from_where": how["begin"], **target.settings(), "group": how["group"], "auto_commit": False}
    consumer = PullConsumer(**given)
    try:
        consumer.subscribe(topic, how["tags"], how["sql"])
    except BaseException:
        consumer.close()
        raise
    return consumer


def _store_start(target: Target, topic: str, how: dict[str, Any]) -> None:
    """Where the group begins in queues in which it has no offset: stored before anything is read.

    Otherwise a command that was killed would begin elsewhere the next time, and miss what came meanwhile. A group with members
    has begun. Errors name similar topics.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group
    from rocketmq_spark.options.parsing import consume_from
    from rocketmq_spark.queues.environment import environment_of

    reads = target.for_role("batch source")
    client, own = reads.client(), own_group(target, how["group"])
    environment = environment_of(reads.options())
    changes = groups.offset_changes(client, own, [topic], consume_from(how["begin"]), environment, "--from")
    fresh = {change.queue: change.after for change in changes if change.before is None}
    if fresh and not groups.members(client, own, [change.queue for change in changes]):
        groups.store_offsets(client, own, fresh)
        groups.warn_of_unseen_members(client, own, fresh)


@click.command(cls=SendingCommand)
@click.argument("topic")
@consuming("latest")
@click.option("--idle", "idle_s", type=FloatRange(0), help="Stop after this many seconds without a message.")
@connected
@click.pass_obj
def consume(output: Output, /, target: Target, topic: str, idle_s: float | None, **how: Any) -> None:
    """Consume messages of TOPIC as a member of a group, until --count, --idle or Ctrl-C. Prints JSON, one object per line.

    The group shares the queues among its members. Offsets are committed when lines are written, so a message is printed at
    least once: if the command is killed, the last lines may come again. Lines that the reader of a pipe did not read are not
    printed again; use --count instead of `| head`.
    """
    from rocketmq_spark.consumer.pull import PolledMessages

    if sys.stdout is None:
        raise OptionError("standard output is closed: messages would be consumed and printed nowhere")
    lines, left, stop = Json(), how["count"], Latch()
    with subscribed(target, topic, how) as consumer, on_signals(stop.set, signal.SIGINT, signal.SIGTERM):
        last_s = time.monotonic()
        while not stop.is_set() and (left is None or left > 0):
            polled = PolledMessages(consumer, _POLL_S if idle_s is None else min(_POLL_S, idle_s))
            messages, now_s = polled.messages, time.monotonic()
            _print(lines, consumer, polled, left)
            left = None if left is None else left - len(messages)
            if not messages and idle_s is not None and now_s - last_s >= idle_s:
                return
            last_s = now_s if messages else last_s
    if stop.is_set():
        raise KeyboardInterrupt


def _print(lines: Json, consumer: PullConsumer, polled: PolledMessages, most: int | None) -> None:
    """Print ``most`` messages of one queue, and commit how far all queues are: one in which nothing came has an offset, too.

    Also what was written before the pipe closed is committed.
    """
    try:
        for written, message in enumerate(polled.messages[:most], 1):
            lines.item({**document(message), "reconsumeTimes": message.reconsume_times}, "")
            polled.mark_finished(written)
    finally:
        consumer.commit()
