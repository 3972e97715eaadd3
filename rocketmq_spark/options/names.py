"""Names in options: functions (``module:callable``), unknown names, and names of Spark's Kafka source.

An error for a Kafka name contains the name here; docs/coming-from-kafka.md compares all of them.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from rocketmq_spark.base.arguments import synchronous, text
from rocketmq_spark.errors import OptionError

# A service that runs other people's queries must not import code that their options name.
ALLOWED = "ROCKETMQ_SPARK_ALLOW_CALLABLES"
_NO = ("0", "false", "no")


def resolve(given: str | Callable[..., Any], option: str) -> Callable[..., Any]:
    """Return ``given`` if it is callable, else the function that ``module:callable`` names; ``option`` is for the error."""
    if callable(given):
        synchronous(f"option {option!r}", given)
        return given
    text(f"option {option!r}", given, "module:callable or a function")
    if os.environ.get(ALLOWED, "1").strip().lower() in _NO:
        raise OptionError(
            f"option {option!r} is {given!r}, which names code to run, but variable {ALLOWED} forbids that",
            remedy="Give a built-in value, or the function itself; or ask the operator who set the variable",
        )
    module, _, path = given.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError, ValueError) as e:
        raise OptionError(f"option {option!r} is {given!r}; expected module:callable that can be imported ({e})") from e
    if not callable(thing):
        raise OptionError(f"option {option!r} is {given!r}; expected a callable, found {type(thing).__name__}")
    synchronous(f"option {option!r}", thing)
    called: Callable[..., Any] = thing
    return called


def nearest(option: str, given: str, known: Sequence[str]) -> str:
    """Return the problem of the unknown name ``given``, with the known names and the nearest one."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"option {option!r} is {given!r}; expected one of {', '.join(known)}{hint}"


# Options, in lower case, of spark-sql-kafka-0-10.
KAFKA_OPTIONS = {
    "kafka.bootstrap.servers": "the address of the cluster is option 'nameServer', a name server's host:port",
    "bootstrap.servers": "the address of the cluster is option 'nameServer', a name server's host:port",
    "kafka.group.id": "the consumer group is option 'group'",
    "groupidprefix": "the consumer group is option 'group'",
    "includeheaders": "headers are the column properties, see option 'includeProperties'",
    "headers": "headers are the column properties, see option 'includeProperties'",
    "key": "a message has columns 'keys', by which it is found, and 'shardingKey', which chooses its queue with "
    "option 'queueSelector' = hash",
    "auto.offset.reset": "the start of a new query is option 'startingOffsets', of a new group 'consumeFromWhere'",
    "partition": "a partition is a queue: columns 'queueId' and 'brokerName'; option 'assign' reads some queues only",
    "fetchoffset.numretries": "the number of retries is option 'numRetries'",
    "fetchoffset.retryintervalms": "the pause between two tries is option 'retryInterval'",
    "kafkaconsumer.polltimeoutms": "the time that a task waits for a broker is option 'readDeadline'",
    "kafka.security.protocol": "TLS is option 'tls', users are options 'accessKey' and 'secretKey'",
    "kafka.sasl.mechanism": "users are options 'accessKey' and 'secretKey'",
    "kafka.sasl.jaas.config": "users are options 'accessKey' and 'secretKey'",
    "kafka.ssl.truststore.location": "authorities to trust are option 'tlsCaFile', a PEM file",
    "kafka.ssl.keystore.location": "the client's certificate is option 'tlsCertFile', a PEM file, its key 'tlsKeyFile'",
    "kafka.ssl.key.password": "the password of the key file is option 'tlsKeyPassword'",
    "kafka.ssl.endpoint.identification.algorithm": "the check of the host name in certificates is option 'tlsCheckHostname'",
    "kafka.request.timeout.ms": "the time for one request is option 'requestTimeout'",
    "kafka.max.partition.fetch.bytes": "bytes under way in a task are bounded by option 'maxBytesInFlight'",
    "kafka.compression.type": "compression of messages is option 'compression'",
    "kafka.acks": "the required store status is option 'requireStoreOk'",
    "kafka.delivery.timeout.ms": "the time for a send with all its retries is option 'sendTimeout'",
    "kafka.batch.size": "the size of a batch is option 'batchMaxBytes'",
    "kafka.max.request.size": "the largest message that is sent is option 'maxMessageSize'",
}

# Columns of Kafka's source, with the columns of this source that replace them.
KAFKA_SOURCE_COLUMNS = {
    "key": "'keys' (array<string>)",
    "value": "'body' (binary)",
    "partition": "'brokerName' and 'queueId'",
    "offset": "'queueOffset'",
    "timestamp": "'storeTimestamp', or 'bornTimestamp' of the sender",
    "timestamptype": "none: there are 'bornTimestamp' and 'storeTimestamp'",
    "headers": "'properties' (map<string,string>)",
}

# Columns of Kafka's sink, without ``value`` and ``topic``, which this sink has, too.
KAFKA_SINK_COLUMNS = {
    "key": "'shardingKey', which chooses the queue with option 'queueSelector' = hash, and 'keys', by which messages are found",
    "partition": "'queueId' and 'brokerName'",
    "headers": "'properties' (map<string,string>)",
    "timestamp": "none: brokers set the store time; 'deliverAt' delays a message",
}


def of_kafka_option(name: str) -> str | None:
    """Return the equivalent of a Kafka option; None if ``name`` is not a Kafka option."""
    lower = name.lower()
    other = "settings of Kafka's clients have no effect here; for equivalents: rocketmq-spark help coming-from-kafka"
    known = KAFKA_OPTIONS.get(lower) or KAFKA_OPTIONS.get(lower.removeprefix("kafka."))
    return known or (other if lower.startswith("kafka.") else None)


def unknown_option(name: str, options: Sequence[str]) -> str:
    """Return the sentence about an unknown option, with the equivalent of a Kafka option or the nearest of ``options``."""
    if of_kafka := of_kafka_option(name):
        return f"option {name!r} is unknown: {of_kafka}"
    known = {each.lower().replace("_", ""): each for each in options}
    near = difflib.get_close_matches(name.lower().replace("_", ""), known, n=1, cutoff=0.6)
    hint = f"; did you mean {known[near[0]]!r}?" if near else "; all: rocketmq-spark help options"
    return f"option {name!r} is unknown{hint}"


def of_kafka_column(name: str, sink: bool = False) -> str:
    """Return the end of a sentence about an unknown column; empty if ``name`` is not a Kafka column."""
    here = (KAFKA_SINK_COLUMNS if sink else KAFKA_SOURCE_COLUMNS).get(name.lower())
    return f"; for Kafka's {name.lower()!r} there is {here}" if here else ""
