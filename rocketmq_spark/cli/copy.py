"""``rocketmq-spark copy``: messages of a topic to another topic or cluster, by a consumer group whose offsets say how far.

Every copy is acknowledged before the offset behind its original is committed: nothing is missing after a restart, and what was
sent since the last commit is sent again.
"""

from __future__ import annotations

import signal
import time
import zlib
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.process import on_signals
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.command import SendingCommand
from rocketmq_spark.cli.connection import ENVIRONMENT_OPTIONS, Target, connected, parse_pairs, read_secret_files
from rocketmq_spark.cli.output import Output
from rocketmq_spark.cli.produce import rate_option
from rocketmq_spark.cli.tail import consumer_options, subscribed_consumer
from rocketmq_spark.errors import DecodeError, MessageIllegal, MessageRefused, OffsetError, OptionError
from rocketmq_spark.model.send import SendStatus
from rocketmq_spark.queues.selection import by_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rocketmq_spark.consumer.pull import PolledMessages
    from rocketmq_spark.errors import RocketMQError
    from rocketmq_spark.model import MessageQueue, ReceivedMessage
    from rocketmq_spark.model.message import KeyedMessage
    from rocketmq_spark.producer.producer import BaseProducer
    from rocketmq_spark.queues.environment import Environment
    from rocketmq_spark.session.consumers import PullConsumer

    Place = tuple[str, str, Environment | None]

_POLL_S = 0.5
# If the command is killed, a restart repeats the messages sent within this time, and those in flight.
COMMIT_S, UNDER_WAY = 0.25, 256
# Bytes of one batch, by the sizes of the originals. A larger message is sent alone, for which the limit is higher.
_BATCH_BYTES = 512 << 10
# While messages come: how often it is asked whether the end is reached.
_LOOK_S = 1.0
# Shorter pauses are not worth a wait.
_PAUSE_S = 0.01
# With a rate, messages after a time without any are sent as if the time had been this long at most.
_SAVED_S = 1.0
_REFUSED = (DecodeError, MessageIllegal, MessageRefused)


class Copier:
    """Sends copies of messages, and commits the offsets behind those that are acknowledged. ``stop`` ends a pause.

    Messages of one queue go to one queue, those with a sharding key to the queue of its hash. A batch has those of both queues,
    and the next one to a queue leaves when it is acknowledged, so that their order stays.
    """

    def __init__(self, consumer: PullConsumer, producer: BaseProducer, how: dict[str, Any], stop: Latch) -> None:
        self._consumer = consumer
        self._producer = producer
        self._how = how
        self._stop = stop
        self._committed_s = time.monotonic()
        # When the next messages may be sent, by the rate.
        self._due_s = self._committed_s
        self.copied = self.skipped = self.spooled = 0

    def send(self, polled: PolledMessages, most: int | None = None) -> int:
        """Send copies of messages of one queue, in order; returns how many of them are done. Ends before the last one when the
        command is to stop, and when the queue was revoked, for its other messages are those of the next owner, also if that is
        this command.
        """
        rate, done = self._how["rate"], 0
        for chunk in chunks(
            polled.messages[:most], UNDER_WAY if rate is None else max(1, min(UNDER_WAY, int(rate / 10)))
        ):
            if rate is not None:
                self._pace(len(chunk) / rate)
            if self._stop.is_set() or not polled.is_current:
                break
            self._send(chunk)
            done += len(chunk)
            polled.mark_finished(done)
            if time.monotonic() - self._committed_s >= COMMIT_S:
                self.commit()
        return done

    def _pace(self, duration_s: float) -> None:
        """Wait until messages may be sent that count for ``duration_s``. Time without messages counts for a second at most."""
        self._due_s = max(self._due_s, time.monotonic() - _SAVED_S)
        while not self._stop.is_set() and (early_s := self._due_s - time.monotonic()) > _PAUSE_S:
            self._stop.wait(min(early_s, COMMIT_S))
        self._due_s += duration_s

    def _send(self, chunk: Sequence[ReceivedMessage]) -> None:
        by_queue: dict[MessageQueue, list[ReceivedMessage]] = {}
        queues = self._producer.queues(self._how["destination"])
        without_key = queue_for(chunk[0].queue, queues)
        for message in chunk:
            key = message.properties.get(Property.SHARDING_KEY)
            by_queue.setdefault(by_hash(queues, key) if key else without_key, []).append(message)
        for queue, part in by_queue.items():
            self._send_to(queue, part)

    def _send_to(self, queue: MessageQueue, part: Sequence[ReceivedMessage]) -> None:
        try:
            copies = [self._copy(message) for message in part]
            one = len(copies) == 1
            result = self._producer.send(copies[0], queue=queue) if one else self._producer.send_batch(copies, queue)
            self.copied += len(copies)
            self.spooled += len(copies) if result.status is SendStatus.SPOOLED else 0
        except _REFUSED as e:
            if len(part) == 1:
                self._refused(part[0], e)
            else:  # one of them; nothing was stored, because a broker stores a batch as a whole
                for message in part:
                    self._send_to(queue, [message])

    def _copy(self, message: ReceivedMessage) -> KeyedMessage:
        if message.decode_error is not None:
            raise DecodeError(f"it cannot be decoded: {message.decode_error}")
        return copy_of(message, self._how["destination"], self._how["mark"])

    def _refused(self, message: ReceivedMessage, error: RocketMQError) -> None:
        if not self._how["skip_bad"]:
            raise type(error)(
                f"{message.queue} offset {message.queue_offset} cannot be copied: {error.message}",
                remark=error.remark,
                remedy="Use --skip-bad to skip such messages",
            ) from error
        self.skipped += 1

    def commit(self) -> None:
        """Commit behind the copies, all of which are acknowledged, and behind messages that a filter passed over."""
        self._consumer.commit()
        self._committed_s = time.monotonic()


def queue_for(source: MessageQueue, queues: Sequence[MessageQueue]) -> MessageQueue:
    """Return which of the destination's ``queues`` gets the copies of a source queue: the one at the same broker name with the
    same id or, if there is none, one that broker name and id select. It does not depend on other source queues, which are not in
    the route while their broker is away.
    """
    place = source.broker_name, source.queue_id
    number = zlib.crc32(source.broker_name.encode()) + source.queue_id
    return next((q for q in queues if (q.broker_name, q.queue_id) == place), queues[number % len(queues)])


def moved(
    sources: Sequence[MessageQueue], queues: Sequence[MessageQueue]
) -> dict[MessageQueue, tuple[MessageQueue, MessageQueue]]:
    """Return the source queues whose copies releases up to 0.1.0 sent to another queue, with that queue and the one of now."""
    both = {source: (queues[place % len(queues)], queue_for(source, queues)) for place, source in enumerate(sources)}
    return {source: (before, now) for source, (before, now) in both.items() if before != now}


def chunks(messages: Sequence[ReceivedMessage], most: int) -> Iterator[list[ReceivedMessage]]:
    """Messages in a row that one send takes."""
    chunk: list[ReceivedMessage] = []
    size = 0
    for message in messages:
        mine = max(message.store_size, len(message.body))
        alone = mine > _BATCH_BYTES
        if chunk and (alone or len(chunk) >= most or size + mine > _BATCH_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(message)
        size += mine
        if alone:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def copy_of(message: ReceivedMessage, topic: str, mark: str | None) -> KeyedMessage:
    """What is sent: body, tags, keys, the user's properties, the sharding key and the flag; the id of the original as property
    ``mark``.
    """
    from rocketmq_spark.model.message import KeyedMessage
    from rocketmq_spark.wire.properties import is_reserved

    own = {name: value for name, value in message.properties.items() if not is_reserved(name)}
    if mark:
        own[mark] = message.msg_id
    sharding_key = message.properties.get(Property.SHARDING_KEY)
    return KeyedMessage(topic, message.body, message.tags, message.keys, own, message.flag, sharding_key=sharding_key)


@click.command(cls=SendingCommand)
@click.argument("source")
@click.argument("destination")
@consumer_options("earliest")
@click.option(
    "--to-name-server", metavar="HOST:PORT", help="Name server of the destination [default: that of the source]."
)
@click.option(
    "--to-option",
    "to_options",
    multiple=True,
    callback=parse_pairs,
    metavar="NAME=VALUE",
    help="An option of the destination's producer, such as accessKey=…, secretKey=@FILE or tls=true (may be repeated). The "
    "environment is that of the source; environment=NAME selects another one, and environment= (without a value) none.",
)
@rate_option("Copy at most this many messages a second.")
@click.option(
    "--follow/--no-follow", default=False, help="Wait for new messages, or stop at the end. [default: no-follow]"
)
@click.option("--mark", metavar="NAME", help="Give each copy this property, with the id of its original.")
@click.option("--skip-bad", is_flag=True, help="Skip messages that cannot be decoded or sent [default: fail].")
@connected
@click.pass_obj
def copy(output: Output, /, target: Target, **how: Any) -> None:
    """Copy messages of topic SOURCE to topic DESTINATION, of the same or another cluster.

    To resume a copy, run the command again with the same --group. No message is lost. After Ctrl-C none is copied twice. If the
    command was killed or a send failed, messages sent in the last 0.25 s and those in flight (up to 256) are copied again. If a
    send got no answer, the producer repeats it, and its messages may be copied twice. With --mark, readers can recognize
    duplicates.

    Messages with a sharding key are copied to the queue that the hash of the key selects, in order per key. The other messages of
    a queue are copied to one queue, in their order: to the one at the same broker name with the same id, if there is one. A copy
    has the body, tags, keys, flag, properties and sharding key of the original, and its own id and times.
    """
    source, destination = how["source"], how["destination"]
    how["to_options"] = read_secret_files(output, "--to-option", how["to_options"])
    to = _destination(target, how)
    # It must be there: brokers that create topics on demand would make a misspelt one.
    if _overlap(_place(to, destination), _place(target, source)):
        raise OptionError(f"{source} would be copied to itself", remedy="Name another topic, or --to-name-server")
    stop, begun_s = Latch(), time.monotonic()
    reads, group = target.for_role("batch source"), how["group"]
    copied = copied_offsets(reads, group, source)  # before a new group gets the offsets at which it begins
    with subscribed_consumer(target, source, how) as consumer, to.producer() as producer:
        changes = moved(list(copied), producer.queues(destination))
        if changes := {queue: places for queue, places in changes.items() if copied[queue]}:
            output.warning(_moved_text(group, changes))
        copier = Copier(consumer, producer, how, stop)
        with on_signals(stop.set, signal.SIGINT, signal.SIGTERM):
            _run(copier, consumer, reads, how, stop)
        took_s = time.monotonic() - begun_s
    _say(output, copier, how, took_s)
    if stop.is_set():
        raise KeyboardInterrupt


def _overlap(one: set[Place], other: set[Place]) -> bool:
    """Where there is no environment it is all of them."""
    return any(a[:2] == b[:2] and (a[2] == b[2] or None in (a[2], b[2])) for a in one for b in other)


def _place(target: Target, topic: str) -> set[Place]:
    """Brokers by address, with the topic's name there, and the environment: what two spellings of one topic share."""
    from rocketmq_spark.queues.environment import environment_of

    reads = target.for_role("batch source")
    client, environment = reads.client(), environment_of(reads.options())
    route = client.routes.get_existing(topic, 0.0)
    on_wire = client.calls.on_wire(topic)
    return {(address, on_wire, environment) for data in route.brokers.values() for address in data.addresses.values()}


def _destination(target: Target, how: dict[str, Any]) -> Target:
    """Where the copies go: to the cluster of the source, by the options of it that a producer has, or to another one. Both in
    the environment of the source, for environments share the queues of the destination, too; ``environment=`` is none.

    Raises ``OptionError`` where what is read with TLS would be sent in plain text without a word, and for a Proxy, which
    would reject each copy because it names a queue.
    """
    from rocketmq_spark import options
    from rocketmq_spark.options.transport import features

    more = {_plain(name) for name in how["to_options"]}
    if how["to_name_server"] is not None and "tls" not in more and options.parse(target.given).tls:
        raise OptionError(
            "the source is read with TLS, and no option says whether the server of --to-name-server uses TLS",
            remedy="Add --to-option tls=true, or tls=false to send in plain text",
        )
    given = {_plain(name): (name, value) for name, value in target.for_role("producer").given.items()}
    if how["to_name_server"] is not None:
        inside = {key: given[key] for key in ENVIRONMENT_OPTIONS if key in given}
        given = {"nameserver": ("name_server", how["to_name_server"]), **inside}
    given |= {_plain(name): (name, value) for name, value in how["to_options"].items()}
    if given.get("environment", ("", None))[1] == "":
        given = {key: option for key, option in given.items() if key not in ENVIRONMENT_OPTIONS}
    to = Target(dict(given.values()))
    if (chooses := features(options.parse(to.given)).chooses_queues) is not None:
        raise OptionError(
            f"option 'transport' of the destination is 'grpc', but {chooses}, and copies keep their order by naming queues",
            remedy="Use --to-option transport=remoting and --to-name-server, with the name server of the destination's brokers",
        )
    return to


def _plain(name: str) -> str:
    """An option is written in two ways."""
    return name.replace("_", "").lower()


def _run(copier: Copier, consumer: PullConsumer, target: Target, how: dict[str, Any], stop: Latch) -> None:
    """Until the ends that the queues have now, unless it is to follow; until ``count``, or ``stop``."""
    from rocketmq_spark.consumer.pull import PolledMessages

    ends = None if how["follow"] else _ends(target, how["source"])
    left, look = how["count"], Deadline.after(_LOOK_S)
    while not stop.is_set():
        polled = PolledMessages(consumer, _POLL_S)
        done = copier.send(polled, left)
        left = None if left is None else left - done
        if left == 0 or stop.is_set():
            break
        if not polled.messages or look.expired:
            copier.commit()
            if ends is not None and _reached(target, how["group"], ends):
                break
            look = Deadline.after(_LOOK_S)
    copier.commit()


def copied_offsets(target: Target, group: str, source: str) -> dict[MessageQueue, int | None]:
    """Return the group's offsets of the source's queues in the environment.

    Raises ``OffsetError`` for an offset beyond the end of its queue: the consumer would continue at the end, and the messages
    before the end would count as copied.
    """
    from rocketmq_spark.admin import deadline
    from rocketmq_spark.cli.lag import own_group
    from rocketmq_spark.queues.environment import Own, environment_of

    client = target.client()
    queues = Own(environment_of(target.options()))(client.routes.get_existing(source, 0.0).readable())
    committed = client.brokers.committed(own_group(target, group), queues, deadline(client))
    known = {queue: offset for queue, offset in committed.items() if offset}
    bounds = client.brokers.bounds(sorted(known), deadline(client)) if known else {}
    for queue, offset in known.items():
        if queue in bounds and offset > bounds[queue].max_offset:
            raise OffsetError(
                f"group {group} has copied {queue} up to {offset}, and the queue ends at {bounds[queue].max_offset}: its topic "
                "was created again",
                topic=queue.topic,
                remedy="To copy the new topic, name a new --group, or set its offsets with rocketmq-spark offsets set",
            )
    return committed


def _moved_text(group: str, changes: Mapping[MessageQueue, tuple[MessageQueue, MessageQueue]]) -> str:
    listed = "; ".join(f"{source} to {now}, before {before}" for source, (before, now) in changes.items())
    return (
        "Releases up to 0.1.0 chose the queues of copies by the order of the source's queues. If one of them copied for group "
        f"{group} while the topics had the queues that they have now, later copies of these queues (but for messages with a "
        f"sharding key) go to other queues than earlier ones: {listed}"
    )


def _ends(target: Target, source: str) -> dict[MessageQueue, int]:
    """Of the queues that belong to the environment, where there is one."""
    from rocketmq_spark.admin import deadline
    from rocketmq_spark.cli.topic_reader import not_readable_error
    from rocketmq_spark.queues.environment import Own, environment_of

    client = target.client()
    route = client.routes.get(source, 0.0)
    if route.closed:  # it would end without what they have
        raise not_readable_error(route)
    queues = Own(environment_of(target.options()))(route.readable())
    return {queue: bounds.max_offset for queue, bounds in client.brokers.bounds(queues, deadline(client)).items()}


def _reached(target: Target, group: str, ends: dict[MessageQueue, int]) -> bool:
    """Whether the group, which other members may read for, is there. Raises ``OffsetError`` where it never will be."""
    from rocketmq_spark.admin import deadline
    from rocketmq_spark.cli.lag import own_group

    client = target.client()
    committed = client.brokers.committed(own_group(target, group), sorted(ends), deadline(client))
    left = {queue: end for queue, end in ends.items() if (committed[queue] or 0) < end}
    if not left:
        return True
    bounds = client.brokers.bounds(sorted(left), deadline(client))
    for queue, end in left.items():
        if queue not in bounds or bounds[queue].max_offset < end:
            now = f"ends at {bounds[queue].max_offset}" if queue in bounds else "is gone"
            raise OffsetError(
                f"{queue} ended at {end} when the copy began, and now {now}: its topic was created again, or has fewer queues",
                topic=queue.topic,
                remedy="Its other messages up to then are not copied. To copy what is there now, run the command again",
            )
    return False


def _say(output: Output, copier: Copier, how: dict[str, Any], took_s: float) -> None:
    row = {
        "source": how["source"],
        "destination": how["destination"],
        "copied": copier.copied,
        "skipped": copier.skipped,
        "spooled": copier.spooled,
    }
    text = f"Copied {copier.copied} messages from {how['source']} to {how['destination']} in {took_s:.1f} s"
    text += f"; {copier.spooled} of them went to the spool" if copier.spooled else ""
    output.item(row, text + (f"; {copier.skipped} were skipped" if copier.skipped else ""))
    if copier.spooled:
        output.note("See what is not delivered yet: rocketmq-spark spool show SPOOLDIR; to deliver it: spool send")
