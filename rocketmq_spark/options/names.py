"""Names in options: functions (``module:callable``), unknown names, and names of Spark's Kafka source and of other clients.

The error for a foreign name contains the equivalent name of this package. docs/coming-from-kafka.md compares the names of Spark's
Kafka source with those of this package.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from rocketmq_spark.base.arguments import check_synchronous, check_text
from rocketmq_spark.errors import OptionError

# A service that runs other people's queries sets this variable to false, so that it does not run code that options name.
CALLABLES_VARIABLE = "ROCKETMQ_SPARK_ALLOW_CALLABLES"
_YES_TEXTS, _NO_TEXTS = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def camel_case(name: str) -> str:
    """The name of an option, or of a key of JSON, for a Python name."""
    first_word, *other_words = name.split("_")
    return first_word + "".join(map(str.capitalize, other_words))


def resolve(value: str | Callable[..., Any], option: str) -> Callable[..., Any]:
    """Return ``value`` if it is callable, else the function that ``module:callable`` names; ``option`` is for the error."""
    if callable(value):
        check_synchronous(f"option {option!r}", value)
        return value
    check_text(f"option {option!r}", value, "module:callable or a function")
    if not code_allowed():
        raise OptionError(
            f"option {option!r} is {value!r}, which names code to run, but variable {CALLABLES_VARIABLE} forbids that",
            remedy="Give a built-in value, or the function itself; or ask the operator who set the variable",
        )
    module, _, path = value.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as e:
        raise OptionError(f"option {option!r} is {value!r}; expected module:callable that can be imported ({e})") from e
    if not callable(target):
        raise OptionError(f"option {option!r} is {value!r}; expected a callable, found {type(target).__name__}")
    check_synchronous(f"option {option!r}", target)
    function: Callable[..., Any] = target
    return function


def code_allowed() -> bool:
    """Whether options may name code, or expressions that may run for ever. Raises ``OptionError`` if the variable has an unknown
    value, so that a typing error allows nothing.
    """
    value = os.environ.get(CALLABLES_VARIABLE)
    if value is None or value.strip().lower() in _YES_TEXTS:
        return True
    if value.strip().lower() in _NO_TEXTS:
        return False
    raise OptionError(
        f"variable {CALLABLES_VARIABLE} is {value!r}; expected {', '.join(_YES_TEXTS)} to allow options that name code, or "
        f"{', '.join(_NO_TEXTS)} to forbid them"
    )


def unknown_value(option: str, value: str, names: Sequence[str]) -> str:
    """Return the problem of the unknown name ``value``, with the known names and the nearest one."""
    name_by_lower_name = {name.lower(): name for name in names}
    similar_names = difflib.get_close_matches(value.lower(), name_by_lower_name, n=1)
    hint = f"; did you mean {name_by_lower_name[similar_names[0]]!r}?" if similar_names else ""
    return f"option {option!r} is {value!r}; expected one of {', '.join(names)}{hint}"


# Options of spark-sql-kafka-0-10, in lower case, with a clause about the equivalent.
KAFKA_OPTIONS = {
    "kafka.bootstrap.servers": "the address of the cluster is option 'nameServer', a name server's host:port",
    "bootstrap.servers": "the address of the cluster is option 'nameServer', a name server's host:port",
    "kafka.group.id": "the consumer group is option 'group'",
    "groupidprefix": "the consumer group is option 'group'",
    "headers": "headers are the column properties, see option 'includeProperties'",
    "key": "a message has columns 'keys', by which it is found, and 'shardingKey', which chooses its queue unless option "
    "'queueSelector' chooses another",
    "auto.offset.reset": "the start of a new query is option 'startingOffsets', of a new group 'consumeFromWhere'",
    "partition": "a partition is a queue: columns 'queueId' and 'brokerName'; option 'assign' reads some queues only",
    "fetchoffset.numretries": "the number of retries is option 'numRetries'",
    "fetchoffset.retryintervalms": "the pause between two tries is option 'retryInterval'",
    "kafkaconsumer.polltimeoutms": "the time that a task waits for a broker is option 'readDeadline'",
    "kafka.security.protocol": "TLS is option 'tls', credentials are options 'accessKey' and 'secretKey'",
    "kafka.sasl.mechanism": "credentials are options 'accessKey' and 'secretKey'",
    "kafka.sasl.jaas.config": "credentials are options 'accessKey' and 'secretKey'",
    "kafka.ssl.truststore.location": "trusted certificates are option 'tlsCaFile', a PEM file",
    "kafka.ssl.keystore.location": "the client's certificate is option 'tlsCertFile', a PEM file, its key 'tlsKeyFile'",
    "kafka.ssl.key.password": "the password of the key file is option 'tlsKeyPassword'",
    "kafka.ssl.endpoint.identification.algorithm": "the check of the host name in certificates is option 'tlsCheckHostname'",
    "kafka.request.timeout.ms": "the time for one request is option 'requestTimeout'",
    "kafka.max.partition.fetch.bytes": "bytes under way in a task are bounded by option 'maxBytesInFlight'",
    "kafka.compression.type": "compression of messages is option 'compression'",
    "kafka.acks": "for acks=all, set option 'requireStoreOk' = ok; brokers acknowledge each send also without it",
    "kafka.delivery.timeout.ms": "the time for a send with all its retries is option 'sendTimeout'",
    "kafka.batch.size": "the size of a batch is option 'batchMaxBytes'",
    "kafka.max.request.size": "the largest message that is sent is option 'maxMessageSize'",
}

# Sentences about our options, with the names that other clients (Java, aiokafka, confluent-kafka, rocketmq-clients) use for them,
# in lower case and without separators.
_CLIENT_OPTIONS_BY_SENTENCE = {
    "the address of the cluster is option "
    "'nameServer', a name server's host:port": "bootstrapservers metadatabrokerlist nameserveraddress namesrv",
    "the address of a Proxy is option 'proxyEndpoint', with 'transport' = grpc": "endpoints endpoint",
    "the group of a producer or consumer is option 'group'": "groupid groupname producergroup consumergroup",
    "remove it: a sink repeats a send within option 'sendTimeout'; a producer, as in Java, up to two times if no queue is "
    "chosen. Option 'onSendFailure' keeps what still fails": (
        "retries maxretries retrytimes maxattempts messagesendmaxretries retrytimeswhensendfailed "
        "retrytimeswhensendasyncfailed"
    ),
    "the required store status is option 'requireStoreOk'": "retryanotherbrokerwhennotstoreok acks requestrequiredacks",
    "remove it: there is no such setting. What is stored once although a send is repeated is option 'confirmAmbiguous' of a "
    "producer, and 'deliveryGuarantee' = exactly-once of the sink": "enableidempotence transactionalid",
    "remove it: readers get a transactional message after its commit only, as with read_committed; there is no option": (
        "isolationlevel"
    ),
    "the time for a send with its retries is option 'sendTimeout', that for one "
    "request is option 'requestTimeout'": "sendmsgtimeout messagetimeoutms deliverytimeoutms timeout timeoutms",
    "the time for one request is option 'requestTimeout'": "requesttimeoutms sockettimeoutms mqclientapitimeout",
    "the pause between metadata requests is option 'retryInterval'": "retrybackoffms reconnectbackoffms",
    "how long a batch waits is option 'batchMaxDelay', with 'autoBatch'": "lingerms linger queuebufferingmaxms",
    "the size of a batch is option 'batchMaxBytes', with 'autoBatch'": "batchsize maxbatchsize",
    "the size of all waiting batches is option 'totalBatchMaxBytes'": "buffermemory queuebufferingmaxkbytes",
    "the largest message that is sent is option 'maxMessageSize'": "maxrequestsize messagemaxbytes",
    "compression of messages is option 'compression'": "compressiontype compressiontypestr compresstype compressioncodec",
    "the size from which on bodies are compressed is option 'compressAbove'": "compressmsgbodyoverhowmuch",
    "avoiding slow brokers is option 'sendLatencyFault'": "sendlatencyfaultenable",
    "where a new group starts is option 'consumeFromWhere'": "autooffsetreset consumetimestamp",
    "automatic commits are option 'autoCommit'": "enableautocommit autocommitenable",
    "the time between commits is option 'autoCommitInterval'": "autocommitintervalms",
    "broadcasting is option 'model'": "messagemodel",
    "the number of threads that call "
    "the listener is option 'consumeThreadMin'": "consumethreadmax consumethreadnums consumptionthreadcount",
    "how often a failed "
    "message is delivered again is option 'maxReconsumeTimes'": "maxdeliveryattempts retrytimeswhenconsumefailed",
    "the messages of one pull are option 'pullBatchSize'": "maxpollrecords fetchmaxmessages pullbatchnums",
    "the bytes of one pull are option 'pullBatchSizeInBytes'": "fetchmaxbytes maxpartitionfetchbytes",
    "messages that wait in a queue are bounded by option 'pullThresholdForQueue'": "maxcachemessagecount queuedminmessages",
    "bytes that wait in a queue "
    "are bounded by option 'pullThresholdSizeForQueue'": "maxcachemessagesizeinbytes queuedmaxmessageskbytes",
    "the time that a listener may take is option 'consumeTimeout'": "maxpollintervalms",
    "how queues are shared "
    "among members is option 'allocationStrategy'": "allocatemessagequeuestrategy partitionassignmentstrategy",
    "TLS is option 'tls', with 'tlsCaFile' and 'tlsCertFile'; credentials are options 'accessKey' and 'secretKey'": (
        "securityprotocol"
    ),
    "TLS is option 'tls', with 'tlsCaFile' and 'tlsCertFile'": "tlsenable usetls sslcontext",
    "trusted certificates are option 'tlsCaFile', a PEM file": "sslcafile sslcalocation",
    "the client's certificate is option 'tlsCertFile', a PEM file": "sslcertificatelocation sslcertfile",
    "the key of the client's certificate is option 'tlsKeyFile', a PEM file": "sslkeylocation sslkeyfile",
    "credentials are options 'accessKey' and 'secretKey'": (
        "saslmechanism saslmechanisms saslusername saslpassword credentials ak sk"
    ),
    "bodies are bytes and keys are text; convert them before you send and after you receive, in Spark with "
    "cast(body AS string)": "valueserializer keyserializer valuedeserializer keydeserializer",
    "a micro-batch is limited by option 'maxOffsetsPerTrigger', for all queues together": (
        "maxrateperpartition sparkstreamingkafkamaxrateperpartition"
    ),
}
CLIENT_OPTIONS = {
    name: sentence for sentence, foreign_names in _CLIENT_OPTIONS_BY_SENTENCE.items() for name in foreign_names.split()
}

# Columns of Kafka's source, with the columns of this source that replace them.
KAFKA_SOURCE_COLUMNS = {
    "key": "'keys' (array<string>)",
    "value": "'body' (binary)",
    "partition": "'brokerName' and 'queueId'",
    "offset": "'queueOffset'",
    "timestamp": "'bornTimestamp', the sender's time, as in Kafka, or 'storeTimestamp', the broker's",
    "timestamptype": "none: there are 'bornTimestamp' and 'storeTimestamp'",
    "headers": "'properties' (map<string,string>)",
}

# Columns of Kafka's sink, without ``value`` and ``topic``, which this sink has, too.
KAFKA_SINK_COLUMNS = {
    "key": "'shardingKey', which chooses the queue, and 'keys', by which messages are found",
    "partition": "'queueId' and 'brokerName'",
    "headers": "'properties' (map<string,string>)",
    "timestamp": "none: brokers set the store time; 'deliverAt' delays a message",
}


_NO_EQUIVALENT = "remove it: settings of Kafka's clients have no effect here; see docs/coming-from-kafka.md"


def foreign_option_equivalent(name: str, spark_options: Container[str] = ()) -> str | None:
    """Return a sentence with the equivalent of an option of Spark's Kafka source or another client; None for other names.

    ``spark_options`` are the options of this package's sources and sinks. The argument matters only if ``name`` has the prefix
    ``kafka.``, which Spark's Kafka connector uses.
    """
    lower_name = name.lower()
    has_kafka_prefix = lower_name.startswith("kafka.")
    bare_name = lower_name.removeprefix("kafka.")
    sentence = (
        KAFKA_OPTIONS.get(lower_name) or KAFKA_OPTIONS.get(bare_name) or CLIENT_OPTIONS.get(_normalized(bare_name))
    )
    if sentence is None:
        return _NO_EQUIVALENT if has_kafka_prefix else None
    named_options = re.findall(r"'(\w+)'", sentence.partition(", with ")[0])
    if (
        has_kafka_prefix
        and spark_options
        and named_options
        and not any(option in spark_options for option in named_options)
    ):
        return f"remove it: Spark's sources and sinks have no such option. In clients, {sentence}"
    return sentence


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Below this similarity a suggestion would mislead: "linger_ms" and "machine_rooms" have 0.6.
_MIN_SIMILARITY = 0.8


def unknown_option(name: str, spellings: Mapping[str, str], spark_options: Container[str] = ()) -> str:
    """Return the sentence about an unknown option. If another client has the option, the sentence names the equivalent option
    of this package; otherwise it names the most similar option.

    ``spellings`` has the spelling of each option in errors, by name; ``spark_options`` is as in ``foreign_option_equivalent``.
    """
    spelling_by_normalized_name = {_normalized(spelt): spelt for spelt in spellings.values()}
    normalized_name = _normalized(name.lower().removeprefix("kafka."))
    if name.lower().startswith("kafka.") and normalized_name in spelling_by_normalized_name:
        return f"option {name!r} is unknown: here it is option {spelling_by_normalized_name[normalized_name]!r}"
    if sentence := foreign_option_equivalent(name, spark_options):
        equivalent = re.sub(r"'(\w+)'", lambda quoted: repr(spellings.get(quoted[1], quoted[1])), sentence)
        return f"option {name!r} is unknown: {equivalent}"
    similar_names = difflib.get_close_matches(
        _normalized(name), spelling_by_normalized_name, n=1, cutoff=_MIN_SIMILARITY
    )
    hint = (
        f"; did you mean {spelling_by_normalized_name[similar_names[0]]!r}?"
        if similar_names
        else "; docs/options.md lists all options"
    )
    return f"option {name!r} is unknown{hint}"


def kafka_port_remedy(addresses: Iterable[str]) -> str:
    """Return the remedy for name servers at Kafka's usual port; empty for other addresses."""
    kafka_addresses = [address for address in addresses if address.endswith(":9092")]
    if not kafka_addresses:
        return ""
    return f"{', '.join(kafka_addresses)} has Kafka's usual port: give the port of the name server, 9876 unless it was changed"


def kafka_column_hint(name: str, for_sink: bool = False) -> str:
    """Return the end of a sentence about an unknown column; empty if ``name`` is not a Kafka column."""
    equivalent = (KAFKA_SINK_COLUMNS if for_sink else KAFKA_SOURCE_COLUMNS).get(name.lower())
    return (
        f"; for Kafka's {name.lower()!r} there is {equivalent}, or option 'kafkaColumns' = true" if equivalent else ""
    )
