"""What Spark's Kafka source calls things, and what is meant here: hints for those who come from there.

docs/coming-from-kafka.md has the same side by side, with the habits behind the names.
"""

from __future__ import annotations

# Options, in lower case, of spark-sql-kafka-0-10.
OPTIONS = {
    "kafka.bootstrap.servers": "the address of the cluster is option 'nameServer', a name server's host:port",
    "bootstrap.servers": "the address of the cluster is option 'nameServer', a name server's host:port",
    "kafka.group.id": "the consumer group is option 'group'",
    "groupidprefix": "the consumer group is option 'group'",
    "includeheaders": "headers are the column properties, see option 'includeProperties'",
    "headers": "headers are the column properties, see option 'includeProperties'",
    "key": "of a message there are columns 'keys', by which it is found, and 'shardingKey', which chooses its queue with "
    "option 'queueSelector' = hash",
    "partition": "a partition is a queue: columns 'queueId' and 'brokerName'; option 'assign' reads some queues only",
    "fetchoffset.numretries": "how often is asked again is option 'numRetries'",
    "fetchoffset.retryintervalms": "the pause between two tries is option 'retryInterval'",
    "kafkaconsumer.polltimeoutms": "how long a task waits for a broker is option 'readDeadline'",
    "kafka.security.protocol": "TLS is option 'tls', users are options 'accessKey' and 'secretKey'",
    "kafka.sasl.mechanism": "users are options 'accessKey' and 'secretKey'",
    "kafka.sasl.jaas.config": "users are options 'accessKey' and 'secretKey'",
    "kafka.ssl.truststore.location": "authorities to trust are option 'tlsCaFile', a PEM file",
    "kafka.ssl.keystore.location": "the client's certificate is option 'tlsCertFile', a PEM file, its key 'tlsKeyFile'",
    "kafka.ssl.key.password": "the password of the key file is option 'tlsKeyPassword'",
    "kafka.ssl.endpoint.identification.algorithm": "whether a certificate must name the host is option 'tlsCheckHostname'",
    "kafka.request.timeout.ms": "the time for one request is option 'requestTimeout'",
    "kafka.max.partition.fetch.bytes": "bytes under way in a task are bounded by option 'maxBytesInFlight'",
    "kafka.compression.type": "compression of messages is option 'compression'",
    "kafka.acks": "what counts as stored is option 'requireStoreOk'",
    "kafka.delivery.timeout.ms": "the time for a send with all its retries is option 'sendTimeout'",
    "kafka.batch.size": "the size of a batch is option 'batchMaxBytes'",
    "kafka.max.request.size": "the largest message that is sent is option 'maxMessageSize'",
}

# Columns that its source gives, with those that stand for them here.
SOURCE_COLUMNS = {
    "key": "'keys' (array<string>)",
    "value": "'body' (binary)",
    "partition": "'brokerName' and 'queueId'",
    "offset": "'queueOffset'",
    "timestamp": "'storeTimestamp', or 'bornTimestamp' of the sender",
    "timestamptype": "none: there are 'bornTimestamp' and 'storeTimestamp'",
    "headers": "'properties' (map<string,string>)",
}

# Columns that its sink takes; ``value`` and ``topic`` are known here too.
SINK_COLUMNS = {
    "key": "'shardingKey' chooses the queue (with option 'queueSelector' = hash), by 'keys' messages are found",
    "partition": "'queueId' and 'brokerName'",
    "headers": "'properties' (map<string,string>)",
    "timestamp": "none: brokers set the store time; 'deliverAt' delays a message",
}


def of_option(name: str) -> str | None:
    """What the option of Kafka's is here; None where ``name`` is none of its options."""
    lower = name.lower()
    other = "settings of Kafka's clients mean nothing here; docs/coming-from-kafka.md lists what there is instead"
    return OPTIONS.get(lower, other if lower.startswith("kafka.") else None)


def of_column(name: str, sink: bool = False) -> str:
    """The end of a sentence about an unknown column; empty where ``name`` is none of Kafka's."""
    here = (SINK_COLUMNS if sink else SOURCE_COLUMNS).get(name.lower())
    return f"; for Kafka's {name.lower()!r} there is {here}" if here else ""
