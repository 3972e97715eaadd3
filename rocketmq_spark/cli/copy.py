"""``rocketmq-spark copy``: copies the messages of a topic to another topic or cluster. The offsets of a consumer group record the
progress.

The offset after a message is committed only when the copy of the message is acknowledged. So after a restart no message is
missing, and the messages that were sent since the last commit are sent again.
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
from rocketmq_spark.cli.connection import (
    ENVIRONMENT_OPTIONS,
    Target,
    parse_pairs,
    read_secret_files,
    with_connection_options,
)
from rocketmq_spark.cli.output import Output
from rocketmq_spark.cli.produce import rate_option
from rocketmq_spark.cli.tail import consumer_options, subscribed_consumer
from rocketmq_spark.errors import DecodeError, MessageIllegal, MessageRefused, OffsetError, OptionError
from rocketmq_spark.model.send import SendStatus
from rocketmq_spark.queues.selection import select_by_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rocketmq_spark.consumer.pull import PolledMessages
    from rocketmq_spark.errors import RocketMQError
    from rocketmq_spark.model import MessageQueue, ReceivedMessage
    from rocketmq_spark.model.message import KeyedMessage
    from rocketmq_spark.producer.producer import BaseProducer
    from rocketmq_spark.queues.environment import Environment
    from rocketmq_spark.session.consumers import PullConsumer

    Location = tuple[str, str, Environment | None]

_POLL_TIMEOUT_S = 0.5
# If the command is killed, a restart repeats the messages in flight, and those sent in the last ``COMMIT_INTERVAL_S``.
COMMIT_INTERVAL_S, MAX_IN_FLIGHT = 0.25, 256
# The most bytes of the original messages of one batch. A larger message is sent without a batch.
_MAX_BATCH_BYTES = 512 << 10
# While messages arrive, the command checks at this interval whether the group has reached the end.
_END_CHECK_INTERVAL_S = 1.0
# The command skips a pause that is not longer than this.
_MIN_PAUSE_S = 0.01
# After a time without messages, the command may exceed ``--rate`` to catch up for at most this many seconds.
_MAX_CREDIT_S = 1.0
_BAD_MESSAGE_ERRORS = (DecodeError, MessageIllegal, MessageRefused)


class Copier:
    """Sends copies of messages, and commits the offsets of messages whose copies are acknowledged. ``stop_latch`` ends a
    pause.

    Messages with a sharding key go to the queue that the hash of the key selects. The other messages of a source queue go to
    one queue. To keep the order of messages, a batch contains messages for one queue, and is acknowledged before the next batch
    is sent.
    """

    def __init__(
        self, consumer: PullConsumer, producer: BaseProducer, arguments: dict[str, Any], stop_latch: Latch
    ) -> None:
        self._consumer = consumer
        self._producer = producer
        self._arguments = arguments
        self._stop_latch = stop_latch
        self._last_commit_s = time.monotonic()
        # The monotonic time from which the rate allows the next messages.
        self._next_send_s = self._last_commit_s
        self.copied_count = self.skipped_count = self.spooled_count = 0

    def send(self, polled_messages: PolledMessages, limit: int | None = None) -> int:
        """Send copies of the messages of one queue, in order. Returns how many messages were copied or skipped. Ends early if the
        command stops, or if the queue was revoked. The next owner of a revoked queue, which may be this command, gets the rest of
        the messages.
        """
        rate, done_count = self._arguments["rate"], 0
        for chunk in chunks(
            polled_messages.messages[:limit],
            MAX_IN_FLIGHT if rate is None else max(1, min(MAX_IN_FLIGHT, int(rate / 10))),
        ):
            if rate is not None:
                self._pace(len(chunk) / rate)
            if self._stop_latch.is_set() or not polled_messages.is_current:
                break
            self._send(chunk)
            done_count += len(chunk)
            polled_messages.mark_finished(done_count)
            if time.monotonic() - self._last_commit_s >= COMMIT_INTERVAL_S:
                self.commit()
        return done_count

    def _pace(self, duration_s: float) -> None:
        """Wait until the rate allows the next messages, and reserve ``duration_s`` for them. After idle time, the command sends
        at most one second's messages without a pause.
        """
        self._next_send_s = max(self._next_send_s, time.monotonic() - _MAX_CREDIT_S)
        while not self._stop_latch.is_set() and (wait_s := self._next_send_s - time.monotonic()) > _MIN_PAUSE_S:
            self._stop_latch.wait(min(wait_s, COMMIT_INTERVAL_S))
        self._next_send_s += duration_s

    def _send(self, chunk: Sequence[ReceivedMessage]) -> None:
        messages_by_queue: dict[MessageQueue, list[ReceivedMessage]] = {}
        queues = self._producer.queues(self._arguments["destination"])
        keyless_queue = queue_for(chunk[0].queue, queues)
        for message in chunk:
            key = message.properties.get(Property.SHARDING_KEY)
            messages_by_queue.setdefault(select_by_hash(queues, key) if key else keyless_queue, []).append(message)
        for queue, messages in messages_by_queue.items():
            self._send_to(queue, messages)

    def _send_to(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> None:
        try:
            copies = [self._copy(message) for message in messages]
            is_single = len(copies) == 1
            result = (
                self._producer.send(copies[0], queue=queue) if is_single else self._producer.send_batch(copies, queue)
            )
            self.copied_count += len(copies)
            self.spooled_count += len(copies) if result.status is SendStatus.SPOOLED else 0
        except _BAD_MESSAGE_ERRORS as e:
            if len(messages) == 1:
                self._skip_or_raise(messages[0], e)
            else:  # a broker stores all messages of a batch or none, so none was stored: send each message alone
                for message in messages:
                    self._send_to(queue, [message])

    def _copy(self, message: ReceivedMessage) -> KeyedMessage:
        if message.decode_error is not None:
            raise DecodeError(f"it cannot be decoded: {message.decode_error}")
        return copy_of(message, self._arguments["destination"], self._arguments["mark"])

    def _skip_or_raise(self, message: ReceivedMessage, error: RocketMQError) -> None:
        if not self._arguments["skip_bad"]:
            raise type(error)(
                f"{message.queue} offset {message.queue_offset} cannot be copied: {error.message}",
                remark=error.remark,
                remedy="Use --skip-bad to skip such messages",
            ) from error
        self.skipped_count += 1

    def commit(self) -> None:
        """Commit the offsets after the messages that were copied, or that a filter skipped. All copies are acknowledged."""
        self._consumer.commit()
        self._last_commit_s = time.monotonic()


def queue_for(source: MessageQueue, queues: Sequence[MessageQueue]) -> MessageQueue:
    """Return the queue of the destination that gets the copies of a source queue: the queue with the same broker name and id. If
    the destination has no queue with this broker name and id, a number that is computed from both selects a queue. Other source
    queues do not influence the result, so it stays the same if one of them is missing in the route.
    """
    broker_and_id = source.broker_name, source.queue_id
    queue_number = zlib.crc32(source.broker_name.encode()) + source.queue_id
    return next((q for q in queues if (q.broker_name, q.queue_id) == broker_and_id), queues[queue_number % len(queues)])


def remapped_queues(
    sources: Sequence[MessageQueue], queues: Sequence[MessageQueue]
) -> dict[MessageQueue, tuple[MessageQueue, MessageQueue]]:
    """Return the source queues whose copies went to another queue in releases up to 0.1.0. The values are the old and the new
    queue of the destination.
    """
    mappings = {
        source: (queues[index % len(queues)], queue_for(source, queues)) for index, source in enumerate(sources)
    }
    return {
        source: (old_queue, new_queue) for source, (old_queue, new_queue) in mappings.items() if old_queue != new_queue
    }


def chunks(messages: Sequence[ReceivedMessage], max_messages: int) -> Iterator[list[ReceivedMessage]]:
    """Yield consecutive messages that fit into one send."""
    chunk: list[ReceivedMessage] = []
    chunk_bytes = 0
    for message in messages:
        message_bytes = max(message.store_size, len(message.body))
        is_large = message_bytes > _MAX_BATCH_BYTES
        if chunk and (is_large or len(chunk) >= max_messages or chunk_bytes + message_bytes > _MAX_BATCH_BYTES):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(message)
        chunk_bytes += message_bytes
        if is_large:
            yield chunk
            chunk, chunk_bytes = [], 0
    if chunk:
        yield chunk


def copy_of(message: ReceivedMessage, topic: str, mark: str | None) -> KeyedMessage:
    """The copy of a message: body, tags, keys, the user's properties, sharding key and flag, and the original's id as property
    ``mark``.
    """
    from rocketmq_spark.model.message import KeyedMessage
    from rocketmq_spark.wire.properties import is_reserved

    properties = {name: value for name, value in message.properties.items() if not is_reserved(name)}
    if mark:
        properties[mark] = message.msg_id
    sharding_key = message.properties.get(Property.SHARDING_KEY)
    return KeyedMessage(
        topic, message.body, message.tags, message.keys, properties, message.flag, sharding_key=sharding_key
    )


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
@with_connection_options
@click.pass_obj
def copy(output: Output, /, target: Target, **arguments: Any) -> None:
    """Copy messages of topic SOURCE to topic DESTINATION, of the same or another cluster.

    To resume a copy, run the command again with the same --group. No message is lost. After Ctrl-C, no message is copied twice.
    If the command was killed or a send failed, messages sent in the last 0.25 s and those in flight (up to 256) are copied again.
    If a send got no answer, the producer repeats it, and its messages may be copied twice. With --mark, readers can recognize
    duplicates.

    Messages with a sharding key are copied to the queue that the hash of the key selects, in order per key. The other messages of
    a queue are copied to one queue, in their order: to the destination queue with the same broker name and id, if that queue
    exists. A copy has the body, tags, keys, flag, properties and sharding key of the original, and its own id and times.
    """
    source, destination = arguments["source"], arguments["destination"]
    arguments["to_options"] = read_secret_files(output, "--to-option", arguments["to_options"])
    destination_target = _destination_target(target, arguments)
    # The destination must exist, because brokers that create topics automatically would create a misspelt topic.
    if _is_same_location(_locations(destination_target, destination), _locations(target, source)):
        raise OptionError(f"{source} would be copied to itself", remedy="Name another topic, or --to-name-server")
    stop_latch, begun_s = Latch(), time.monotonic()
    source_target, group = target.for_role("batch source"), arguments["group"]
    offsets_before = copied_offsets(
        source_target, group, source
    )  # read before ``subscribed_consumer``, which stores start offsets
    with subscribed_consumer(target, source, arguments) as consumer, destination_target.producer() as producer:
        queue_changes = remapped_queues(list(offsets_before), producer.queues(destination))
        if queue_changes := {
            queue: old_and_new for queue, old_and_new in queue_changes.items() if offsets_before[queue]
        }:
            output.warning(_remapping_text(group, queue_changes))
        copier = Copier(consumer, producer, arguments, stop_latch)
        with on_signals(stop_latch.set, signal.SIGINT, signal.SIGTERM):
            _copy_all(copier, consumer, source_target, arguments, stop_latch)
        duration_s = time.monotonic() - begun_s
    _report(output, copier, arguments, duration_s)
    if stop_latch.is_set():
        raise KeyboardInterrupt


def _is_same_location(source: set[Location], destination: set[Location]) -> bool:
    """Whether a location of the source is also a location of the destination. A location without an environment matches the same
    location in every environment.
    """
    return any(a[:2] == b[:2] and (a[2] == b[2] or None in (a[2], b[2])) for a in source for b in destination)


def _locations(target: Target, topic: str) -> set[Location]:
    """Return the locations of a topic: for each address of its brokers, the address, the topic's name on the wire, and the
    environment. All spellings of a topic have the same locations.
    """
    from rocketmq_spark.queues.environment import environment_of

    source_target = target.for_role("batch source")
    client, environment = source_target.client(), environment_of(source_target.options())
    route = client.routes.get_existing(topic, 0.0)
    wire_topic = client.rpc_client.name_on_wire(topic)
    return {
        (address, wire_topic, environment) for data in route.brokers.values() for address in data.addresses.values()
    }


def _destination_target(target: Target, arguments: dict[str, Any]) -> Target:
    """Return the target of the copies: another cluster, or the cluster of the source. For the cluster of the source, the target
    has the options of the source that a producer accepts. By default, copies go to the environment of the source, because
    environments may share the queues of the destination, too. The option ``environment=`` (without a value) selects no
    environment.

    Raises ``OptionError`` if messages that are read with TLS would be sent in plain text without an explicit option. Also raises
    ``OptionError`` for a Proxy, because a Proxy rejects messages that name their queue, as copies do.
    """
    from rocketmq_spark import options
    from rocketmq_spark.options.transport import features

    to_option_names = {_normalized(name) for name in arguments["to_options"]}
    if (
        arguments["to_name_server"] is not None
        and "tls" not in to_option_names
        and options.parse(target.given_options).tls
    ):
        raise OptionError(
            "the source is read with TLS, and no option says whether the server of --to-name-server uses TLS",
            remedy="Add --to-option tls=true, or tls=false to send in plain text",
        )
    given_options = {
        _normalized(name): (name, value) for name, value in target.for_role("producer").given_options.items()
    }
    if arguments["to_name_server"] is not None:
        environment_options = {key: given_options[key] for key in ENVIRONMENT_OPTIONS if key in given_options}
        given_options = {"nameserver": ("name_server", arguments["to_name_server"]), **environment_options}
    given_options |= {_normalized(name): (name, value) for name, value in arguments["to_options"].items()}
    if given_options.get("environment", ("", None))[1] == "":
        given_options = {key: option for key, option in given_options.items() if key not in ENVIRONMENT_OPTIONS}
    destination_target = Target(dict(given_options.values()))
    if (problem := features(options.parse(destination_target.given_options)).queue_choice_problem) is not None:
        raise OptionError(
            f"option 'transport' of the destination is 'grpc', but {problem}, and copies keep their order by naming queues",
            remedy="Use --to-option transport=remoting and --to-name-server, with the name server of the destination's brokers",
        )
    return destination_target


def _normalized(name: str) -> str:
    """Return an option's name in lower case without underscores, because each name has two spellings."""
    return name.replace("_", "").lower()


def _copy_all(
    copier: Copier, consumer: PullConsumer, target: Target, arguments: dict[str, Any], stop_latch: Latch
) -> None:
    """Copy messages up to the current ends of the queues. With ``follow``, copy without end. Stops after ``count`` messages, or
    when ``stop_latch`` is set.
    """
    from rocketmq_spark.consumer.pull import PolledMessages

    end_offsets = None if arguments["follow"] else _end_offsets(target, arguments["source"])
    remaining_count, next_end_check = arguments["count"], Deadline.after(_END_CHECK_INTERVAL_S)
    while not stop_latch.is_set():
        polled_messages = PolledMessages(consumer, _POLL_TIMEOUT_S)
        done_count = copier.send(polled_messages, remaining_count)
        remaining_count = None if remaining_count is None else remaining_count - done_count
        if remaining_count == 0 or stop_latch.is_set():
            break
        if not polled_messages.messages or next_end_check.expired:
            copier.commit()
            if end_offsets is not None and _has_reached(target, arguments["group"], end_offsets):
                break
            next_end_check = Deadline.after(_END_CHECK_INTERVAL_S)
    copier.commit()


def copied_offsets(target: Target, group: str, source: str) -> dict[MessageQueue, int | None]:
    """Return the committed offsets of the group in the queues of ``source`` that belong to the environment.

    Raises ``OffsetError`` for an offset beyond the end of its queue. With such an offset, the consumer would continue at the
    end, and would not copy the messages before the end.
    """
    from rocketmq_spark.admin import deadline
    from rocketmq_spark.cli.lag import own_group
    from rocketmq_spark.queues.environment import EnvironmentQueues, environment_of

    client = target.client()
    queues = EnvironmentQueues(environment_of(target.options()))(
        client.routes.get_existing(source, 0.0).readable_queues()
    )
    committed_offsets = client.offset_reader.committed(own_group(target, group), queues, deadline(client))
    known_offsets = {queue: offset for queue, offset in committed_offsets.items() if offset}
    bounds = client.offset_reader.bounds(sorted(known_offsets), deadline(client)) if known_offsets else {}
    for queue, offset in known_offsets.items():
        if queue in bounds and offset > bounds[queue].max_offset:
            raise OffsetError(
                f"group {group} has copied {queue} up to {offset}, and the queue ends at {bounds[queue].max_offset}: its topic "
                "was created again",
                topic=queue.topic,
                remedy="To copy the new topic, name a new --group, or set its offsets with rocketmq-spark offsets set",
            )
    return committed_offsets


def _remapping_text(group: str, queue_changes: Mapping[MessageQueue, tuple[MessageQueue, MessageQueue]]) -> str:
    changes_text = "; ".join(
        f"{source} to {new_queue}, earlier to {old_queue}" for source, (old_queue, new_queue) in queue_changes.items()
    )
    return (
        "Releases up to 0.1.0 chose the queues of copies by the order of the source's queues. If such a release copied for "
        f"group {group}, and the topics still have the same queues, new copies of these queues go to other queues than earlier "
        f"copies (except messages with a sharding key): {changes_text}"
    )


def _end_offsets(target: Target, source: str) -> dict[MessageQueue, int]:
    """The ends of the source's queues that belong to the environment; without an environment, of all queues."""
    from rocketmq_spark.admin import deadline
    from rocketmq_spark.cli.topic_reader import not_readable_error
    from rocketmq_spark.queues.environment import EnvironmentQueues, environment_of

    client = target.client()
    route = client.routes.get(source, 0.0)
    if route.unreadable_brokers:  # a copy would omit the messages of queues without read permission
        raise not_readable_error(route)
    queues = EnvironmentQueues(environment_of(target.options()))(route.readable_queues())
    return {queue: bounds.max_offset for queue, bounds in client.offset_reader.bounds(queues, deadline(client)).items()}


def _has_reached(target: Target, group: str, end_offsets: dict[MessageQueue, int]) -> bool:
    """Whether the committed offsets of the group have reached the ends. Other members of the group may commit, too. Raises
    ``OffsetError`` if the group can never reach the ends.
    """
    from rocketmq_spark.admin import deadline
    from rocketmq_spark.cli.lag import own_group

    client = target.client()
    committed_offsets = client.offset_reader.committed(own_group(target, group), sorted(end_offsets), deadline(client))
    remaining_ends = {queue: end for queue, end in end_offsets.items() if (committed_offsets[queue] or 0) < end}
    if not remaining_ends:
        return True
    bounds = client.offset_reader.bounds(sorted(remaining_ends), deadline(client))
    for queue, end in remaining_ends.items():
        if queue not in bounds or bounds[queue].max_offset < end:
            now_text = f"ends at {bounds[queue].max_offset}" if queue in bounds else "is gone"
            raise OffsetError(
                f"{queue} ended at {end} when the copy began, and now {now_text}: its topic was created again, or "
                "has fewer queues",
                topic=queue.topic,
                remedy="The copy may lack messages of this queue. To copy the messages that are there now, run the command again",
            )
    return False


def _report(output: Output, copier: Copier, arguments: dict[str, Any], duration_s: float) -> None:
    row = {
        "source": arguments["source"],
        "destination": arguments["destination"],
        "copied": copier.copied_count,
        "skipped": copier.skipped_count,
        "spooled": copier.spooled_count,
    }
    text = f"Copied {copier.copied_count} messages from {arguments['source']} to {arguments['destination']} in {duration_s:.1f} s"
    text += f"; {copier.spooled_count} of them went to the spool" if copier.spooled_count else ""
    output.item(row, text + (f"; {copier.skipped_count} were skipped" if copier.skipped_count else ""))
    if copier.spooled_count:
        output.note("See what is not delivered yet: rocketmq-spark spool show SPOOLDIR; to deliver it: spool send")
