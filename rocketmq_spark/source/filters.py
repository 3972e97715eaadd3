"""Tag and SQL filters: which one belongs to a topic, what brokers need to check, and what is checked here again.

Brokers compare the hashes of tags, so other tags with the same hash come through; an invalid SQL expression sent with a
pull is answered with every message. Both are closed here: tags are compared as texts, SQL is compiled by a broker
before the first pull.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import BrokerError, OptionError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.wire.subscription import parse_subscription


def of_topic(options: Options, topic: str) -> Filter:
    """The filter of a topic; topics that a JSON filter does not name are read whole."""
    tags, sql = options.tags, options.sql
    expression = tags.get(topic) if isinstance(tags, dict) else tags
    if expression is not None and expression != "*":
        return Filter(" || ".join(parse_subscription(expression).tags), "TAG")
    expression = sql.get(topic) if isinstance(sql, dict) else sql
    return Filter(expression, "SQL92") if expression is not None else NO_FILTER


def check(options: Options) -> None:
    """What can be said without a broker: one kind of filter, and tags that are tags."""
    if options.tags is not None and options.sql is not None:
        raise OptionError("options 'tags' and 'sql' exclude each other: give one of them")
    given = options.tags.values() if isinstance(options.tags, dict) else [options.tags]
    for expression in given:
        if expression is not None and not _tags(expression) and expression.strip() != "*":
            raise OptionError(f"option 'tags' is {expression!r}; expected tags separated by ||")


def _tags(expression: str) -> Sequence[str]:
    try:
        return parse_subscription(expression).tags
    except ValueError:
        return ()


def validate(offsets: OffsetReader, options: Options, queues: Iterable[MessageQueue], deadline: Deadline) -> None:
    """Let one broker of each topic compile its SQL expression. Raises ``OptionError`` with the broker's words."""
    if options.sql is None:
        return
    for topic, broker in sorted({queue.topic: queue.broker_name for queue in queues}.items()):
        sql = of_topic(options, topic)
        if not sql:
            continue
        if offsets.is_proxy(topic, broker, deadline):
            raise OptionError(
                "option 'sql' cannot be used here: a Proxy does not compile the expression, and an invalid one would "
                "be answered with every message",
                remedy="Connect to the brokers, or filter with option 'tags'",
            )
        try:
            offsets.check_filter(broker, options.group, topic, sql.expression, deadline)
        except BrokerError as e:
            if e.retriable:
                raise
            raise OptionError(
                f"option 'sql' is {sql.expression!r}; the broker refuses it",
                e.addr,
                e.broker_code,
                topic,
                None,
                e.remark,
                "Set enablePropertyFilter=true in the broker's configuration if it says that it does not support SQL92"
                if "support" in (e.remark or "")
                else None,
            ) from e


def recorded(options: Options) -> dict[str, object]:
    """The filter as it stands in offsets, so that a changed one is noticed; empty without a filter."""
    found: dict[str, object] = {}
    if options.tags not in (None, "*"):
        found["tags"] = options.tags
    if options.sql is not None:
        found["sql"] = options.sql
    return found
