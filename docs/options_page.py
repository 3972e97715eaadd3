"""The tables of options and columns as docs/options.md shows them, that of errors in docs/errors.md, and ``options/typed.py``."""

from __future__ import annotations

import inspect
import textwrap

from rocketmq_spark import errors
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, DECODE_ERROR, FULL_COLUMNS
from rocketmq_spark.options import ROLES, SOURCE_ROLES, TABLE, Option
from rocketmq_spark.spark.sink import checks

_SHOWN_ROLE = {
    "batch source": "batch",
    "stream source": "stream",
    "sink": "sink",
    "producer": "`Producer`",
    "consumer": "`Consumer`",
    "pull consumer": "`PullConsumer`",
    "cluster admin": "`Admin`",
}

SOURCE_COLUMNS = {
    "topic": "the topic",
    "brokerName": "the broker that stores the queue",
    "queueId": "number of the queue on that broker",
    "queueOffset": "offset in the queue, from 0",
    "body": "the body; never null, except with `badMessage=null`",
    "tags": "the tag that brokers filter by; null when there is none",
    "keys": "business keys, by which tools find the message; null without keys",
    "bornTimestamp": "when it was sent, by the sender's clock; null if the sender gave a time outside the years 1 to 9999, such "
    "as one in nanoseconds (the log of the task says how many)",
    "storeTimestamp": "when its broker stored it; null outside the years 1 to 9999",
    "msgId": "id that the producer assigned; if a sink or a user sends a message again, the copy has another id",
    "properties": "as option `includeProperties` says; null with `none`",
    "offsetMsgId": "id that the broker made of its address and `commitLogOffset`",
    "flag": "number that the sender chose",
    "sysFlag": "bits that say how it is stored: compression, transaction state, IPv6 addresses",
    "reconsumeTimes": "how often a consumer group has sent it back",
    "bornHost": "the sender, `host:port`",
    "storeHost": "the broker, `host:port`",
    "commitLogOffset": "position in the broker's commit log, in bytes",
    "storeSize": "size in the commit log, in bytes",
    "decodeError": "why the message could not be decoded, null if it could; requires `badMessage=null` as well",
}
SINK_COLUMNS = {
    "body": "what is sent; required. Null or empty only with `emptyBodies=mark`",
    "value": "another name of `body`",
    "topic": "topic of the row; option `topic` overrides it",
    "tags": "the tag that readers may filter by",
    "keys": "business keys; a string may hold several, separated by spaces; an element of an array is one key",
    "properties": "properties of the user; a null value is left out",
    "shardingKey": "rows of one key go to one queue, unless `queueSelector` or `queueId` chooses another; null or empty means "
    "any queue",
    "queueId": "the queue itself; null means any queue, or that of the `shardingKey`",
    "brokerName": "its broker; goes with `queueId`",
    "delayLevel": "deliver after the delay of this level in the broker's delay table",
    "delayMs": "deliver this many milliseconds after the send",
    "deliverAt": "delivered at this time",
    "flag": "number for readers",
    "priority": "0 and up, higher comes first; null is the lowest. Only over gRPC, to a topic with `message.type=PRIORITY`",
}


def markdown() -> str:
    """The tables as they stand in docs/options.md."""
    return f"{_options()}\n{_source_columns()}\n{_sink_columns()}"


def _source_columns() -> str:
    lines = ["## Columns of the source", "", "In this order.", "", "| column | type | meaning |", "| --- | --- | --- |"]
    for column in (*BASIC_COLUMNS, *FULL_COLUMNS, DECODE_ERROR):
        where = "" if column in BASIC_COLUMNS else " *(`metadata=full`)*"
        lines.append(f"| `{column.name}` | {column.ddl} | {SOURCE_COLUMNS[column.name]}{where} |")
    return "\n".join(lines) + "\n"


def _sink_columns() -> str:
    about = "Names are case-insensitive; an unknown column or a wrong type is an error before the first row is sent."
    lines = ["## Columns of the sink", "", about, "", "| column | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {kind} | {SINK_COLUMNS[name]} |" for name, kind in checks.COLUMNS.items()]
    return "\n".join(lines) + "\n"


# What helps where the text of an error names nothing better.
REMEDIES = {
    "AccessDenied": "check `accessKey` and `secretKey`, and the user's rights (security.md); `doctor` names the missing ones",
    "BrokerBusy": "lower the rate, or give the broker more threads or a faster disk. The client has already retried",
    "BrokerError": "read the broker's text and code, and the broker's log of that time",
    "BrokerNotFound": "check with `rocketmq-spark cluster` which brokers are registered and answer, and start the "
    "missing one with its data. For a query: `rocketmq-spark doctor --checkpoint FOLDER`",
    "CallTimeout": "check whether the broker is frozen or overloaded; raise `requestTimeout` if the network is slow",
    "ReplyTimeout": "check that consumers of the topic run and reply; raise `timeout_s`",
    "CertificateRefused": "set `tlsCaFile` to the authority that signed it; if the text says that only the name differs, connect "
    "to a name in it, or set `tlsCheckHostname` to false, over gRPC `tlsServerName` to the name",
    "ClosedError": "create a new object, in the process that uses it",
    "ConnectionLost": "check that the server runs and can be reached: `rocketmq-spark doctor`, `addressMap`",
    "DataLossError": "continue with `failOnDataLoss=warn`, which logs the lost offsets; configure a longer retention",
    "UnprovedError": "bring the broker back with its store; or run the batch once with `deliveryGuarantee=at-least-once`",
    "DecodeError": "inspect the message with `rocketmq-spark tail`; set `badMessage` to `null` or `skip` to continue",
    "GoAway": "nothing: the client reconnects",
    "GroupNotFound": "check the name; create the group (`Admin.create_group`) or start one of its members",
    "InvalidParameter": "check the names of topic and group, and the queue id",
    "LocalBrokerError": "read the lines of the server's log in the text; `rocketmq-spark doctor` checks Java and ports",
    "LocalProtocolError": "change the value, or make another call, as the text says",
    "MessageIllegal": "compare the message with the broker's `maxMessageSize` and its delay limits",
    "MessageRefused": "correct the row or message that the text names; the text also says what was sent before",
    "NotFound": "check the id or key, and whether retention has removed the message",
    "NotReadable": "restore the read permission of the topic or the broker",
    "NotSupported": "use a server of the right kind (a broker, not a Proxy) or a newer version",
    "OffsetError": "write positions as in options.md, and check the queues with `rocketmq-spark topic describe`; "
    "before you set the offsets of a group, stop its members",
    "CheckpointMismatch": "start the query with the options that created the checkpoint, or with a new `checkpointLocation`",
    "OptionError": "correct the options that the text lists; options.md describes all",
    "RemoteProtocolError": "check that host and port belong to RocketMQ, and that both sides or none use TLS",
    "RocketMQError": "read its text",
    "RouteNotFound": "check the topic's name (`rocketmq-spark topic list`), and that its brokers run",
    "SelectorError": "correct the selector: it must return one of its `queues`",
    "SendFailed": "read the last cause in the text; raise `sendTimeout`, or use a spool (spool.md)",
    "ServerFault": "read the exception in the broker's log",
    "ServiceNotAvailable": "free space on the broker's disk, or write to its master",
    "SpoolError": "check its folder with `rocketmq-spark spool`, and its disk; another process may use the folder",
    "SpoolFull": "raise `spoolMaxBytes`, free space on the disk, or bring the cluster back: spooled messages are then sent",
    "TopicNotFound": "wait until the broker has started, or create the topic there",
}


# What a keyword takes, by the parser of its option; parsers that are made (``integer(1)``) by the function that makes them.
_TYPES = {
    "boolean": "bool | str",
    "integer": "int | str",
    "auto_integer": "int | str",
    "duration": "float | str",
    "positive_duration": "float | str",
    "durations_ms": "str",
    "fault_preset": "bool | str",
    "size": "int | str",
    "choice": "str",
    "names": "Sequence[str] | str",
    "names_with_repeats": "Sequence[str] | str",
    "addresses": "str",
    "name_servers": "str",
    "address_map": "Mapping[str, str] | str",
    "timestamp": "int | str",
    "consume_from_where": "int | str",
    "string": "str",
    "namespace": "str",
    "secret": "str",
    "callable_name": "str",
    "strategy": "Callable[..., Any] | str",
    "selector": "Callable[..., Any] | str",
    "regex": "str",
    "Options": "bool | str",
    **dict.fromkeys(("assignment", "offsets", "queue_numbers"), "Mapping[str, Any] | str"),
    **dict.fromkeys(("topic_filters", "property_columns"), "Mapping[str, str] | str"),
}
# Options that JSON describes may be given as the mapping that it would be.
_MAPPINGS = ("environments", "allocation_config")
_CLASSES = {
    "AdminOptions": ("cluster admin", "Keywords of ``Admin``, which all the other classes and functions take, too."),
    "ProducerOptions": ("producer", "Keywords of ``Producer``."),
    "ConsumerOptions": ("consumer", "Keywords of ``Consumer``."),
    "PullConsumerOptions": ("pull consumer", "Keywords of ``PullConsumer``."),
    "SimpleConsumerOptions": ("simple consumer", "Keywords of ``SimpleConsumer``."),
    "SourceOptions": ("batch source", "Keywords of ``read_rocketmq``."),
    "SinkOptions": ("sink", "Keywords of ``foreach_batch_writer`` and ``write_rocketmq``."),
}
# Those that may be positional are arguments of their own.
_POSITIONAL = ("name_server", "group")


def typed_keywords() -> str:
    """The module ``options/typed.py``: the options that each constructor and writer takes, with their types."""
    parts = [
        '"""Typed keywords of constructors and writers. Written by ``make docs`` from the table of options; do not edit.\n\n'
        "Durations are milliseconds, or text such as ``3s``; sizes are bytes, or text such as ``4m``. An option that is not\n"
        'given has the default in docs/options.md.\n"""\n\n'
        "from __future__ import annotations\n\n"
        "from collections.abc import Callable, Mapping, Sequence\n"
        "from typing import Any, TypedDict\n"
    ]
    for name, (role, about) in _CLASSES.items():
        first = role == "cluster admin"
        lines = [f"class {name}({'TypedDict' if first else 'AdminOptions'}, total=False):", f'    """{about}"""']
        for row in TABLE:
            inherited = not first and "cluster admin" in row.roles
            if role in row.roles and row.field not in _POSITIONAL and not inherited:
                lines += [""] if len(lines) == 2 else []
                lines += [f"    {row.field}: {_type(row)}", _described(row.help)]
        parts.append("\n".join(lines) + "\n")
    return "\n\n".join(parts)


def _type(row: Option) -> str:
    kind = _TYPES[row.parse.__qualname__.partition(".")[0]]
    return f"Mapping[str, Any] | {kind}" if row.field in _MAPPINGS else kind


def _described(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("`", "``") + "."
    text = text[0].upper() + text[1:]
    whole = f'    """{text}"""'
    if len(whole) <= 130:
        return whole
    wrapped = textwrap.wrap(text, 124, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return '    """' + "\n".join(wrapped).lstrip() + '\n    """'


def errors_markdown() -> str:
    """The table of errors as it stands in docs/errors.md: what each class says of itself, and what helps."""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.RocketMQError)]
    lines = [
        "## Codes",
        "",
        "| code | class | temporary | meaning | remedy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in sorted(kinds, key=lambda kind: str(kind.code)):
        meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
        lines.append(
            f"| `{kind.code}` | `{kind.__name__}` | {'yes' if kind.retriable else 'no'} | {meaning} "
            f"| {REMEDIES[kind.__name__]} |"
        )
    return "\n".join(lines) + "\n"


def _options() -> str:
    connection = [row for row in TABLE if row.roles == ROLES or row.field == "route_refresh"]
    source = [row for row in TABLE if set(row.roles) & set(SOURCE_ROLES) and row not in connection]
    parts = []
    for title, rows in (
        ("Connection", connection),
        ("Source", source),
        (
            "Sink and producer",
            [row for row in TABLE if set(row.roles) & {"sink", "producer"} and row not in connection + source],
        ),
        ("Consumers", [row for row in TABLE if set(row.roles) <= {"consumer", "pull consumer"}]),
    ):
        lines = [f"## {title}", "", "| option | default | meaning |", "| --- | --- | --- |"]
        for r in rows:
            alias = f" (or {', '.join(f'`{a}`' for a in r.aliases)})" if r.aliases else ""
            where = "" if len(r.roles) > 1 else f" *({_SHOWN_ROLE[r.roles[0]]} only)*"
            default = (
                r.default_text
                if r.default_text == "–" or "`" in r.default_text or " " in r.default_text
                else f"`{r.default_text}`"
            )
            lines.append(f"| `{r.name}`{alias} | {default} | {r.help}{where} |".replace("||", "\\|\\|"))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
