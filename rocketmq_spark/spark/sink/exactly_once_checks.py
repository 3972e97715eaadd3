"""Checks the requirements of ``deliveryGuarantee`` exactly-once: options and settings of Spark. Pure.

``_CONFLICTING_OPTIONS`` has each option that cannot be combined with exactly-once, and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from rocketmq_spark.base import extras
from rocketmq_spark.columnar.encode.properties import TIMER_COLUMNS
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.parsing import duration
from rocketmq_spark.spark import context_settings
from rocketmq_spark.spark.conf import exactly_once_conf
from rocketmq_spark.spark.spark_options import ASYNC_PROGRESS

EXACTLY_ONCE = "exactly-once"
# Columns of a delayed message.
DELAY_COLUMNS = ("delaylevel", *TIMER_COLUMNS)
MIN_SETTLE_S = 4.0
# After a task has ended, its messages may still arrive at brokers for this time.
IN_FLIGHT_S = 2.0
_KILL_TIMEOUT_SETTING = "spark.python.task.killTimeout"
ADAPTIVE_SETTING = "spark.sql.adaptive.streaming.stateless.enabled"
# The values that Spark uses for settings that are not set.
_DEFAULT_SETTINGS = {"spark.speculation": "false"}


def is_exactly_once(options: Options) -> bool:
    return options.delivery_guarantee == EXACTLY_ONCE


# Options that are rejected together with exactly-once: a condition and its reason.
_CONFLICTING_OPTIONS: tuple[tuple[Callable[[Options], bool], str], ...] = (
    (
        lambda o: not transport.features(o).knows_offsets,
        "'transport' is 'grpc': a Proxy does not say where queues end, nor where a message is stored",
    ),
    (
        lambda o: o.on_send_failure == "spool",
        "'onSendFailure' is 'spool': a spooled row is sent later, without a check whether it is stored",
    ),
    (
        lambda o: o.require_store_ok == "ok",
        "'requireStoreOk' is 'ok': a batch that is stored and not flushed would be stored once more",
    ),
)


def option_problems(options: Options, columns: Collection[str]) -> list[str]:
    """Return the problems of a sink's options. ``columns`` are the names of the DataFrame's columns in lower case."""
    problems = []
    if options.allowed_topics and options.topic is not None:
        problems.append(f"option 'allowedTopics' has no effect with option 'topic', which is {options.topic!r}")
    if not is_exactly_once(options):
        if "exactly_once_settle" in options.given_fields:
            problems.append("option 'exactlyOnceSettle' has no effect without 'deliveryGuarantee' exactly-once")
        return problems
    problems += [
        f"option 'deliveryGuarantee' is exactly-once, but {reason}"
        for conflicts, reason in _CONFLICTING_OPTIONS
        if conflicts(options)
    ]
    delay_columns = sorted(set(columns) & set(DELAY_COLUMNS))
    if delay_columns:
        problems.append(
            f"option 'deliveryGuarantee' is exactly-once, but column {delay_columns[0]!r} delays rows: a delayed row is not in "
            "its topic before it is due, so whether it is stored cannot be seen"
        )
    if options.topic is None and not options.allowed_topics:
        problems.append(
            "option 'deliveryGuarantee' is exactly-once, and rows name their topics: option 'allowedTopics' must list all of "
            "them, so that the ends of their queues can be noted before anything is sent"
        )
    if not extras.is_installed("xxhash"):
        problems.append(
            "option 'deliveryGuarantee' is exactly-once, but xxhash, which hashes rows, is not installed: "
            f"{extras.install_command(extras.ARROW)}"
        )
    if options.exactly_once_settle < MIN_SETTLE_S:
        problems.append(
            f"option 'exactlyOnceSettle' is {options.exactly_once_settle:g} s; expected at least {MIN_SETTLE_S:g} s, because "
            "a task that Spark has cancelled may still send for that long"
        )
    return problems


def written_topics(options: Options) -> list[str]:
    """Return all topics to which rows may be sent."""
    return [options.topic] if options.topic is not None else sorted(set(options.allowed_topics))


def check_settings(get_setting: Callable[[str], str | None], is_streaming: bool, context_text: str) -> None:
    """Raises ``OptionError`` if Spark's settings allow that stages are repeated, or that a repeat has other partitions. The sink
    cannot detect such a repeat. ``get_setting`` returns a setting, or None if it is not set.
    """
    wrong_settings = [
        f"{name}={value} (it is {get_setting(name) or 'not set'})"
        for name, value in exactly_once_conf().items()
        if (get_setting(name) or _DEFAULT_SETTINGS.get(name, "")).lower() != value
        and (is_streaming or name != ADAPTIVE_SETTING)
    ]
    if wrong_settings:
        raise OptionError(
            f"option 'deliveryGuarantee' is exactly-once, but {context_text} lacks {', '.join(wrong_settings)}",
            remedy="Start the Spark context with exactly_once_conf(): SparkSession.builder.config(map=exactly_once_conf()). "
            "After the start, these settings have no effect",
        )


def check_registered_settings() -> None:
    """Call ``check_settings`` for the settings that ``register`` recorded. If ``register`` was not called, nothing is checked
    here, because only tasks see the settings.

    Tasks check ``ADAPTIVE_SETTING``, because it is a setting of the session and may still change.
    """
    settings = context_settings.registered_settings()
    if settings is not None:
        check_settings(settings.get, is_streaming=False, context_text="the Spark context")


def check_progress(options: Options, tracks_asynchronously: bool) -> None:
    """Raise ``OptionError`` for asynchronous progress tracking. With asynchronous progress tracking, Spark may run a batch
    before it logs the batch. So after a restart, Spark may form other batches of the same rows.
    """
    if is_exactly_once(options) and tracks_asynchronously:
        raise OptionError(
            f"option 'deliveryGuarantee' is exactly-once, but option {ASYNC_PROGRESS!r} is true: after a restart Spark may "
            f"form other "
            "batches of the same rows, and the sink would not recognise the rows",
            remedy=f"Remove {ASYNC_PROGRESS!r}, or write with deliveryGuarantee=at-least-once, which may repeat rows",
        )


def check_settle(get_setting: Callable[[str], str | None], settle_s: float) -> None:
    """Raise ``OptionError`` if a task that Spark has cancelled could still send after the settle time."""
    value = get_setting(_KILL_TIMEOUT_SETTING)
    if value is None:
        return
    try:
        kill_timeout_s = duration(value)
    except ValueError:  # raised for units that only Spark knows, which are units of long times
        kill_timeout_s = math.inf
    if kill_timeout_s + IN_FLIGHT_S > settle_s:
        raise OptionError(
            f"option 'exactlyOnceSettle' is {settle_s:g} s, and {_KILL_TIMEOUT_SETTING} is {value}: a cancelled task may "
            "send for that long, "
            "even after its successor has checked what is stored",
            remedy=f"Set exactlyOnceSettle to {IN_FLIGHT_S:g} s more than {_KILL_TIMEOUT_SETTING}, or leave "
            f"{_KILL_TIMEOUT_SETTING} at 2s",
        )


def check_batch(get_property: Callable[[str], str | None], query: str, number: int, names: Mapping[str, str]) -> None:
    """Raise ``OptionError`` if a task runs in another query or batch than the note says. ``names`` are the names of Spark's
    local properties that contain query and batch.
    """
    for name, noted_value in ((names["query"], query), (names["batch"], str(number))):
        value = get_property(name)
        if value is not None and value != noted_value:
            raise OptionError(
                f"the note in the checkpoint says {noted_value}, and Spark says that {name} is {value}",
                remedy="Give the sink the checkpointLocation of its own query, and run one query with a checkpoint at a time",
            )
