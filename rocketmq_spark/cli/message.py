"""``rocketmq-spark message`` and ``dlq``: shows stored messages by id, key or time, and shows and resends dead letters."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from rocketmq_spark.base.clock import utc_text
from rocketmq_spark.cli.command import TIMES, CliGroup, SendingCommand, time_option, with_yes
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.numbers import IntRange
from rocketmq_spark.cli.output import Output
from rocketmq_spark.cli.tail import message_document, message_line

if TYPE_CHECKING:
    from rocketmq_spark.errors import RocketMQError
    from rocketmq_spark.model import Message, OffsetRange, ReceivedMessage, SendResult
    from rocketmq_spark.producer.producer import BaseProducer
    from rocketmq_spark.pull.outcomes import Cause


# A resent dead letter gets a key that consists of this prefix and the id of the dead letter. Brokers index keys, so the next
# command can find the resent message.
_RESENT_KEY_PREFIX = "dlq:"
# The assumed maximum difference between the clocks of brokers and ours.
_CLOCK_TOLERANCE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Selects dead letters that have one of the keys or message ids and were stored in the period (ms since 1970)."""

    keys: frozenset[str]
    stored_since_ms: int | None
    stored_until_ms: int | None

    def __post_init__(self) -> None:
        from rocketmq_spark.errors import OptionError

        if (
            self.stored_since_ms is not None
            and self.stored_until_ms is not None
            and self.stored_since_ms > self.stored_until_ms
        ):
            since, until = utc_text(self.stored_since_ms), utc_text(self.stored_until_ms)
            raise OptionError(f"--since is {since}, but --until is {until}; expected --since not after --until")

    def __call__(self, message: ReceivedMessage) -> bool:
        if self.keys and not self.keys & {message.msg_id, *message.keys}:
            return False
        return (self.stored_since_ms or 0) <= message.store_timestamp and (
            self.stored_until_ms is None or message.store_timestamp < self.stored_until_ms
        )


def _filter_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select dead letters."""
    for add in (
        time_option("--until", "stored_until_ms", help=f"Only dead letters stored before this time: {TIMES}."),
        time_option("--since", "stored_since_ms", help=f"Only dead letters stored at or after this time: {TIMES}."),
        click.option(
            "--key", "keys", multiple=True, help="Only dead letters with this key or message id (may be repeated)."
        ),
    ):
        function = add(function)
    return function


@click.group(cls=CliGroup)
def dlq() -> None:
    """Inspect the dead letters of a consumer group and resend them to their topics."""


@dlq.command()
@click.argument("group")
@_filter_options
@with_connection_options
@click.pass_obj
def show(
    output: Output,
    target: Target,
    group: str,
    keys: tuple[str, ...],
    stored_since_ms: int | None,
    stored_until_ms: int | None,
) -> None:
    """Show the dead letters of GROUP, oldest first."""
    count = 0
    for message in _dead_letters(
        output, target, group, DeadLetterFilter(frozenset(keys), stored_since_ms, stored_until_ms)
    ):
        text = f"{message.topic}  {message.msg_id}  {message_line(message)}"
        output.item({**message_document(message), "reconsumeTimes": message.reconsume_times}, text)
        count += 1
    output.note(f"{count} dead letters of group {group}")


@dlq.command(cls=SendingCommand)
@click.argument("group")
@_filter_options
@with_yes
@click.option("--again", is_flag=True, help="Include dead letters that were resent before.")
@click.option(
    "--any-queue",
    is_flag=True,
    help="Resend even if GROUP belongs to an environment and --environment is not given; the messages may go to queues of any "
    "environment.",
)
@click.option(
    "--to-topic", metavar="NAME", help="Resend all to this topic, not to the topics in which GROUP read them."
)
@with_connection_options
@click.pass_obj
def resend(
    output: Output,
    target: Target,
    group: str,
    keys: tuple[str, ...],
    stored_since_ms: int | None,
    stored_until_ms: int | None,
    apply_change: bool,
    again: bool,
    any_queue: bool,
    to_topic: str | None,
) -> None:
    """Resend dead letters of GROUP to the topics in which GROUP read them. Every group that reads these topics receives them.

    The dead letters are kept. Each dead letter is sent as a new message with the same tags, keys and properties, and with one
    more key: "dlq:" and the id of the dead letter. If brokers find this new key in the topic, the dead letter was resent before
    and is skipped, unless --again is given. Dead letters that cannot be decoded or sent, or whose topic is unknown or does not
    exist, are reported and skipped. If no broker accepts a dead letter, the command fails: run the command again later. The
    command ignores onSendFailure=spool, because the next command would not find messages that wait in a spool, and would send
    them again. If GROUP also reads the dead-letter topic of another group, the topic of a letter may be unknown: name it with
    --to-topic.
    """
    from rocketmq_spark.errors import RocketMQError

    if not any_queue:
        _check_environment(target, group)
    counts = {"sent": 0, "before": 0}
    errors: list[RocketMQError] = []
    find_resend, find_topic_error = _resend_finder(target), _topic_error_finder(target)
    with _without_spool(output, target).producer() as producer:
        for letter in _dead_letters(
            output, target, group, DeadLetterFilter(frozenset(keys), stored_since_ms, stored_until_ms)
        ):
            message = replace(letter, topic=to_topic) if to_topic else letter
            row: dict[str, object] = {"topic": message.topic, "msgId": message.msg_id, "sent": apply_change}
            text = f"{message.msg_id} to {message.topic}"
            if (problem := _unsendable_reason(message) or find_topic_error(message.topic)) is not None:
                errors += [problem] if isinstance(problem, RocketMQError) else []
                _report_skipped(output, row, f"{message.queue} offset {message.queue_offset}, {text},", problem)
                continue
            earlier_id = None if again else _earlier_resend(output, find_resend, message, row)
            if earlier_id is not None:
                row |= {"sent": False, "sentBefore": earlier_id}
                text += f" is skipped: it was resent before, as {earlier_id}"
            elif apply_change:
                result = _resend(producer, message)
                if isinstance(result, RocketMQError):  # the error concerns only this dead letter
                    errors.append(result)
                    _report_skipped(output, row, text, result)
                    continue
                row |= {"newMsgId": result.msg_id, "status": result.status.name}
                text += f" as {result.msg_id}"
            output.item(row, text)
            counts["sent" if earlier_id is None else "before"] += 1
    _note_counts(output, counts["sent"], counts["before"], apply_change)
    if errors:
        raise errors[0]


def _without_spool(output: Output, target: Target) -> Target:
    """Return the target without a spool. If a resent letter waited in a spool, the next command would not find this letter in
    its topic, and would send it again. Without a spool, a dead letter that cannot be sent stays in the dead-letter topic.
    """
    from rocketmq_spark import options
    from rocketmq_spark.session.spools import SPOOL_OPTIONS

    if options.parse(target.given_options).on_send_failure == "spool":
        output.warning("onSendFailure=spool is ignored: a dead letter that cannot be sent stays in its topic")
    return target.without_fields(SPOOL_OPTIONS)


def _unsendable_reason(letter: ReceivedMessage) -> str | None:
    """Return why a dead letter cannot be resent; None if it can."""
    unknown_topic = "the topic in which the group read it is unknown. Name a topic with --to-topic"
    return letter.decode_error or (unknown_topic if letter.topic == letter.queue.topic else None)


def _report_skipped(output: Output, row: dict[str, object], subject: str, reason: object) -> None:
    """Report a skipped dead letter: with a note for people, and with a row for programs, which get no notes."""
    output.note(f"{subject} is skipped: {reason}")
    if output.is_for_programs:
        output.item({**row, "sent": False, "leftOut": str(reason)}, "")


def _earlier_resend(
    output: Output,
    find_resend: Callable[[ReceivedMessage], str | None],
    letter: ReceivedMessage,
    row: dict[str, object],
) -> str | None:
    """Return the id of the message that an earlier resend of a dead letter sent; None if the letter was not resent. If the
    check fails, prints a note and returns None.
    """
    from rocketmq_spark.errors import RocketMQError

    try:
        return find_resend(letter)
    except RocketMQError as e:
        output.note(f"Cannot check whether {letter.msg_id} was resent before: {e}")
        row["notLookedUp"] = str(e)
        return None


def _note_counts(output: Output, sent_count: int, skipped_count: int, apply_change: bool) -> None:
    output.note(f"{sent_count} sent" if apply_change else f"{sent_count} would be sent; use --yes to apply")
    if skipped_count:
        output.note(f"{skipped_count} were resent before and are skipped: --again resends them")


def _check_environment(target: Target, group: str) -> None:
    """Raise ``OptionError`` if the group belongs to an environment and the command has no environment, because letters could go
    to other environments.
    """
    from rocketmq_spark.errors import OptionError
    from rocketmq_spark.queues.environment import environment_of, environment_of_group

    name = environment_of_group(group)
    if name is not None and environment_of(target.options()) is None:
        raise OptionError(
            f"group {group!r} belongs to environment {name!r}, but option 'environment' is not set; without it, other "
            "environments would get the dead letters",
            remedy=f"Omit the ending _env_{name} of the group, and use --environment {name} -o environments=...; or use "
            "--any-queue to send to queues of all environments, as for a group that has this ending by chance",
        )


def _resend(producer: BaseProducer, letter: ReceivedMessage) -> SendResult | RocketMQError:
    """Resend a dead letter, to the queue of its sharding key if it has one. Returns the result, or a final error."""
    from rocketmq_spark.base.codes import Property
    from rocketmq_spark.errors import RocketMQError, RouteNotFound

    key = letter.properties.get(Property.SHARDING_KEY)
    try:
        return producer.send(_new_message(letter), selector="hash" if key else None, arg=key or None)
    except RouteNotFound as e:  # not raised, because letters of other topics can still be resent
        return e
    except RocketMQError as e:
        if e.retriable:
            raise
        return e


def _new_message(letter: ReceivedMessage) -> Message:
    """Return the message to send: the dead letter with the key of this resend, without the keys of earlier resends."""
    from rocketmq_spark.base.codes import Property
    from rocketmq_spark.model.message import KeyedMessage
    from rocketmq_spark.wire.properties import is_reserved

    user_properties = {name: value for name, value in letter.properties.items() if not is_reserved(name)}
    keys = [*(key for key in letter.keys if not key.startswith(_RESENT_KEY_PREFIX)), _RESENT_KEY_PREFIX + letter.msg_id]
    sharding_key = letter.properties.get(Property.SHARDING_KEY)
    return KeyedMessage(
        letter.topic, letter.body, letter.tags, keys, user_properties, letter.flag, sharding_key=sharding_key
    )


def _topic_error_finder(target: Target) -> Callable[[str], RocketMQError | None]:
    """Return a function that checks that a topic exists, because brokers with autoCreateTopicEnable would create a missing
    topic.
    """
    from rocketmq_spark.errors import RouteNotFound

    routes = target.client().routes

    @functools.cache
    def find_topic_error(topic: str) -> RocketMQError | None:
        try:
            routes.get_existing(topic, 0.0)
        except RouteNotFound as e:
            return e
        return None

    return find_topic_error


def _resend_finder(target: Target) -> Callable[[ReceivedMessage], str | None]:
    """Return a function that finds the id of the message that an earlier resend of a dead letter sent. If this command has
    already checked another letter with the same id, the function returns a text that says so.
    """
    seen_letters: set[tuple[str, str]] = set()
    admin = target.client().admin

    def find(letter: ReceivedMessage) -> str | None:
        if (letter.topic, letter.msg_id) in seen_letters:
            return "another letter of this id"
        seen_letters.add((letter.topic, letter.msg_id))
        begin_ms = letter.store_timestamp - _CLOCK_TOLERANCE_MS
        end_ms = time.time_ns() // 1_000_000 + _CLOCK_TOLERANCE_MS
        resent_messages = admin.messages_of_key(letter.topic, _RESENT_KEY_PREFIX + letter.msg_id, begin_ms, end_ms)
        return resent_messages[-1].msg_id if resent_messages else None

    return find


def _dead_letters(
    output: Output, target: Target, group: str, letter_filter: DeadLetterFilter
) -> Iterator[ReceivedMessage]:
    """Yield dead letters. The ``topic`` of a yielded letter is the topic in which the group read the message, or the dead-letter
    topic if the group's topic is unknown.
    """
    from rocketmq_spark.admin.groups import similar_groups_hint
    from rocketmq_spark.base.codes import Property
    from rocketmq_spark.cli import topic_reader
    from rocketmq_spark.errors import RouteNotFound
    from rocketmq_spark.queues.environment import environment_of, scope_of
    from rocketmq_spark.wire.names import dlq_topic, normal_topic

    def warn_of_loss(lost_range: OffsetRange, cause: Cause) -> None:
        output.warning(
            f"{lost_range.size} messages of {lost_range.queue} from offset {lost_range.start} are gone: {cause.value}"
        )

    options = target.options()
    environment, scope = environment_of(options), scope_of(options)
    group_in_environment = environment.group(group) if environment is not None else group
    topic = dlq_topic(group_in_environment)
    reader = topic_reader.TopicReader(options, topic, warn_of_loss)
    try:
        reader.seek(topic_reader.earliest)
    except RouteNotFound:
        if not target.client().routes.has_broker():
            raise
        hint = similar_groups_hint(target.client(), group)
        output.note(
            f"Group {group} has no dead letters: there is no topic {scope.name_on_wire(topic)}. {hint}".rstrip(". ")
        )
        return
    find_read_topic = _read_topic_finder(output, target, group_in_environment)
    for message in filter(letter_filter, reader.messages()):
        properties = message.properties
        recorded_topic = properties.get(Property.RETRY_TOPIC) or properties.get(Property.DLQ_ORIGIN_TOPIC)
        original_topic = (
            scope.user_name(normal_topic(recorded_topic, scope.name_on_wire(group_in_environment)))
            if recorded_topic
            else None
        )
        yield replace(
            message, topic=(find_read_topic(message, original_topic) if original_topic else None) or message.topic
        )


def _read_topic_finder(output: Output, target: Target, group: str) -> Callable[[ReceivedMessage, str], str | None]:
    """Return a function that finds the topic from which the group read the message that became a dead letter. The function
    returns None if no topic, or several topics, are possible.

    Brokers record only the original topic of a message, even if the group read it in the dead-letter topic of another group. A
    client that may write dead letters can claim any original topic. So the original topic is returned only if the group reads it,
    or if the topics of the group are unknown.
    """
    from rocketmq_spark.base.codes import DLQ_PREFIX

    @functools.cache
    def consumed_topics() -> set[str]:
        from rocketmq_spark.errors import AccessDenied, NotSupported

        try:
            return set(target.client().admin.consumed_topics(group))
        except (AccessDenied, NotSupported) as e:
            output.note(
                f"Cannot check whether {group} reads dead letters of other groups: {e}. --to-topic sets the topic"
            )
            return set()

    def find(letter: ReceivedMessage, original_topic: str) -> str | None:
        dead_letter_topics = sorted(
            t for t in consumed_topics() if t.startswith(DLQ_PREFIX) and t != letter.queue.topic
        )
        topics_with_message = [topic for topic in dead_letter_topics if _has_message(target, topic, letter.msg_id)]
        knows_topics = any(not t.startswith("%") for t in consumed_topics())
        if original_topic in consumed_topics():
            candidates = list(dict.fromkeys([original_topic, *topics_with_message]))
        else:
            candidates = topics_with_message or dead_letter_topics or ([] if knows_topics else [original_topic])
        return candidates[0] if len(candidates) == 1 else None

    return find


def _has_message(target: Target, topic: str, msg_id: str) -> bool:
    """Whether the index of a topic has a message with this id."""
    from rocketmq_spark.admin import messages
    from rocketmq_spark.errors import NotFound, RouteNotFound

    try:
        messages.message_by_id(target.client(), msg_id, topic)
    except (NotFound, RouteNotFound):
        return False
    return True


@click.group(cls=CliGroup)
def message() -> None:
    """Show stored messages by their ids, by keys and by time."""


@message.command()
@click.argument("message_id", metavar="ID")
@click.option(
    "--topic", help="The topic of the message. Required if ID is a msgId, or if brokers check permissions (ACL)."
)
@with_connection_options
@click.pass_obj
def get(output: Output, target: Target, message_id: str, topic: str | None) -> None:
    """Show one message by its offset message id or, with --topic, by the id that its producer assigned.

    The broker assigns the offset message id (offsetMsgId), which consists of the broker's address and a position in its log. The
    id that the producer assigned is msgId in the output of 'tail --json'.
    """
    from rocketmq_spark.admin import messages

    stored_message = messages.message_by_id(target.client(), message_id, topic)
    row = {
        **message_document(stored_message),
        "offsetMsgId": stored_message.offset_msg_id,
        "bornHost": stored_message.born_host,
        "storeHost": stored_message.store_host,
        "reconsumeTimes": stored_message.reconsume_times,
        "storeSize": stored_message.store_size,
        "allProperties": dict(stored_message.properties),
    }
    sent_text = (
        f"sent {utc_text(stored_message.born_timestamp)} from {stored_message.born_host}, id {stored_message.msg_id}, "
        f"{stored_message.store_size} bytes stored"
    )
    output.item(row, f"{stored_message.topic}  {message_line(stored_message)}", sent_text)


@message.command()
@click.option("--topic", required=True, help="The topic to look in.")
@click.option(
    "--key",
    help="A business key, or the id that the producer assigned (msgId). Without it: all messages of the period.",
)
@time_option("--from", "--since", "begin_ms", help=f"Only messages stored at or after this time: {TIMES}.")
@time_option("--to", "--until", "end_ms", help="Only messages stored at or before this time.")
@click.option(
    "--limit",
    type=IntRange(1),
    default=32,
    show_default=True,
    help="With --key, show the newest messages, at most this many of each broker (1 to 64). Without it, show the oldest "
    "messages, at most this many in all (1 to 10000).",
)
@with_connection_options
@click.pass_obj
def find(
    output: Output, target: Target, topic: str, key: str | None, begin_ms: int | None, end_ms: int | None, limit: int
) -> None:
    """Show the messages of a topic that have a key, or that were stored in a period, oldest first.

    Give --key, a period (--from, --to), or both. Without --key, the command reads all queues from the masters, or with
    --environment only the queues of that environment.
    """
    from rocketmq_spark.admin import messages
    from rocketmq_spark.queues.environment import environment_of

    if key is None and begin_ms is None and end_ms is None:
        raise click.UsageError("Give --key, or a time: --from, --to or both")
    client = target.client()
    if key is not None:
        matches = messages.messages_by_key(client, topic, key, begin_ms, end_ms, limit)
    else:
        matches = messages.messages_of_time(client, topic, begin_ms, end_ms, limit, environment_of(target.options()))
    for match in matches:
        output.item(message_document(match), message_line(match))
    if key is not None:
        has_reached_limit = any(count >= limit for count in Counter(match.broker_name for match in matches).values())
        hint = (
            "; older ones may be omitted: raise --limit (up to 64), or set --to to the time of the first of these"
            if has_reached_limit
            else ""
        )
        output.note(f"{len(matches)} messages with key {key}{hint}")
    else:
        hint = (
            "; there may be more: raise --limit, or set --from to the time of the last of these"
            if len(matches) == limit
            else ""
        )
        output.note(f"{len(matches)} messages of that time{hint}")
