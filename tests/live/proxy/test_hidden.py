"""A Proxy in cluster mode that advertises an address which cannot be reached. With option addressMap=nameServer everything works.
Without the option, each error names the advertised address and the option.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.sql.types import BinaryType, StructField, StructType

from rocketmq_spark import Admin, Consumer, Message, Producer, PullConsumer, ReceivedMessage, session
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import ConnectionLost, NotSupported, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_clusters import POD
from tests.live.grpc.proxied import new_topic
from tests.mockbroker import eventually
from tests.reading import Run, bodies, data_source, names, read

MAPPED = {"addressMap": "nameServer"}
KEYWORD = {"address_map": "nameServer"}
WORDS = (POD, "remotingAccessAddr", "'addressMap' to nameServer")


@pytest.fixture
def topic(hidden_proxy: LocalBroker) -> str:
    session.close_all()
    return new_topic(hidden_proxy, queues=2)


def send(mq: LocalBroker, topic: str, count: int) -> list[str]:
    made = names(count)
    with Producer(mq.proxy_server, "p", **KEYWORD) as producer:
        for body in made:
            producer.send(Message(topic, body.encode()))
    return made


def sink(mq: LocalBroker, topic: str, made: list[str], **options: object) -> None:
    source, _ = data_source({"nameServer": mq.proxy_server, "topic": topic, **options})
    writer = source.writer(StructType([StructField("body", BinaryType())]), overwrite=False)
    writer.commit([writer.write(iter([pa.RecordBatch.from_pydict({"body": [body.encode() for body in made]})]))])


def consumed(mq: LocalBroker, topic: str, count: int, **options: object) -> list[str]:
    found: list[str] = []
    complete = threading.Event()

    def listener(messages: Sequence[ReceivedMessage], context: object) -> None:
        found.extend(message.body.decode() for message in messages)
        if len(found) >= count:
            complete.set()

    with Consumer(mq.proxy_server, f"g-{topic}", consume_from_where="earliest", **options) as consumer:
        consumer.subscribe(topic)
        consumer.start(listener)
        assert complete.wait(60)
    return found


class TestMapped:
    def test_batches_and_the_sink(self, hidden_proxy: LocalBroker, topic: str) -> None:
        made = names(100)
        sink(hidden_proxy, topic, made, batchMaxBytes="1k", **MAPPED)
        eventually(lambda: len(read(hidden_proxy.proxy_server, subscribe=topic, **MAPPED)) >= 100, 60)
        found = read(hidden_proxy.proxy_server, subscribe=topic, **MAPPED)
        assert Counter(bodies(found)) == Counter(made)
        assert {row["brokerName"] for row in found} == {"broker-a", "broker-b"}

    def test_a_stream_and_its_restart(self, hidden_proxy: LocalBroker, topic: str) -> None:
        given = {"subscribe": topic, "startingOffsets": "earliest", **MAPPED}
        run = Run(hidden_proxy.proxy_server, **given)
        run.drain(send(hidden_proxy, topic, 40))
        again = Run(hidden_proxy.proxy_server, run.offset, **given)
        again.drain(send(hidden_proxy, topic, 20))

    def test_a_consumer(self, hidden_proxy: LocalBroker, topic: str) -> None:
        made = send(hidden_proxy, topic, 20)
        assert Counter(consumed(hidden_proxy, topic, 20, **KEYWORD)) == Counter(made)

    def test_a_pull_consumer_and_offsets(self, hidden_proxy: LocalBroker, topic: str) -> None:
        made, group = send(hidden_proxy, topic, 20), f"g-{topic}"
        found: list[str] = []
        with PullConsumer(hidden_proxy.proxy_server, group, consume_from_where="earliest", **KEYWORD) as consumer:
            consumer.subscribe(topic)
            eventually(lambda: len(found.extend(m.body.decode() for m in consumer.poll(1.0)) or found) >= 20, 60)
            consumer.commit()
        assert Counter(found) == Counter(made)
        with Admin(hidden_proxy.proxy_server, **KEYWORD) as admin:
            assert sum(offset or 0 for offset in admin.offsets(group, [topic]).values()) == 20
            with pytest.raises(NotSupported, match="is a Proxy, which does not forward"):
                admin.topics()

    def test_offsets_of_a_new_group(
        self, hidden_proxy: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        send(hidden_proxy, topic, 10)
        with Admin(hidden_proxy.proxy_server, **KEYWORD) as admin:
            changes = admin.reset_offsets(f"new-{topic}", "earliest", topics=[topic])
            assert {change.before for change in changes} == {None}
            assert set(admin.offsets(f"new-{topic}", [topic]).values()) == {0}
        done = run(hidden_proxy, "topic", "describe", topic)
        assert "10 messages in 4 queues" in done.output + done.stderr
        done = run(hidden_proxy, "offsets", "set", f"cli-{topic}", "--topic", topic, "--to", "earliest", "--yes")
        assert done.exit_code == 0, done.stderr
        done = run(hidden_proxy, "lag", "--group", f"cli-{topic}", "--topic", topic, "--json")
        assert '"lag":10' in done.output.replace(" ", ""), done.output
        caplog.clear()
        done = run(hidden_proxy, "consume", topic, "--group", f"read-{topic}", "--from", "earliest", "--count", "10")
        assert (done.exit_code, len(done.stdout.splitlines())) == (0, 10), done.stderr
        assert "does not see members that are connected to brokers" in caplog.text

    def test_message_traces(self, hidden_proxy: LocalBroker, topic: str) -> None:
        with Producer(hidden_proxy.proxy_server, "shop", enable_trace=True, **KEYWORD) as producer:
            msg_id = producer.send(Message(topic, b"traced")).msg_id
        assert consumed(hidden_proxy, topic, 1, enable_trace=True, **KEYWORD) == ["traced"]

        def recorded() -> list[str]:
            rows = read(hidden_proxy.proxy_server, subscribe="RMQ_SYS_TRACE_TOPIC", **MAPPED)
            traces = [record.split("\x01") for row in rows for record in row["body"].decode().split("\x02")]
            return sorted(fields[0] for fields in traces if msg_id in fields)

        eventually(lambda: recorded() == ["Pub", "SubAfter", "SubBefore"], 60)

    def test_lag_and_doctor(self, hidden_proxy: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        send(hidden_proxy, topic, 10)
        consumed(hidden_proxy, topic, 10, **KEYWORD)
        send(hidden_proxy, topic, 5)
        done = run(hidden_proxy, "lag", "--group", f"g-{topic}", "--topic", topic, "--json")
        assert '"lag":5' in done.output.replace(" ", ""), done.output
        monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
        done = run(hidden_proxy, "doctor", "--group", f"g-{topic}", "--topic", topic)
        assert done.exit_code == 0, done.output
        assert f"{hidden_proxy.proxy_server} answers for its brokers" in " ".join(done.output.split())


def run(mq: LocalBroker, *arguments: str, mapped: bool = True) -> Result:
    session.close_all()
    more = ("-o", "addressMap=nameServer") if mapped else ()
    return CliRunner().invoke(app, [*arguments, "-n", mq.proxy_server, *more])


def explained(call: Callable[[], object]) -> None:
    with pytest.raises(RocketMQError) as caught:
        call()
    assert all(words in str(caught.value) for words in WORDS), caught.value


class TestUnmapped:
    def test_batches(self, hidden_proxy: LocalBroker, topic: str) -> None:
        explained(lambda: read(hidden_proxy.proxy_server, subscribe=topic, numRetries=0))

    def test_a_stream(self, hidden_proxy: LocalBroker, topic: str) -> None:
        explained(lambda: Run(hidden_proxy.proxy_server, subscribe=topic, numRetries=0).batch())

    def test_the_sink(self, hidden_proxy: LocalBroker, topic: str) -> None:
        explained(lambda: sink(hidden_proxy, topic, names(3), sendTimeout="2s", numRetries=0))

    def test_a_producer(self, hidden_proxy: LocalBroker, topic: str) -> None:
        with Producer(hidden_proxy.proxy_server, "p") as producer:
            explained(lambda: producer.send(Message(topic, b"x")))

    def test_a_pull_consumer(
        self, hidden_proxy: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rocketmq_spark.consumer.reachability.MAX_UNREACHED_S", 5.0)
        with PullConsumer(hidden_proxy.proxy_server, f"g-{topic}") as consumer:
            consumer.subscribe(topic)
            assert consumer.poll(1.0) == []
            assert all(words in caplog.text for words in WORDS)
            with pytest.raises(ConnectionLost, match="no broker has answered") as caught:
                consumer.poll(60.0)
        assert all(words in str(caught.value) for words in WORDS)

    def test_a_consumer(self, hidden_proxy: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("WARNING")
        with Consumer(hidden_proxy.proxy_server, f"g-{topic}") as consumer:
            consumer.subscribe(topic)
            consumer.start(lambda messages, context: None)
            eventually(lambda: all(words in caplog.text for words in WORDS), 60)

    def test_lag_and_doctor(self, hidden_proxy: LocalBroker, topic: str) -> None:
        for arguments in (("lag", "--group", "g", "--topic", topic), ("doctor", "--topic", topic)):
            done = run(hidden_proxy, *arguments, mapped=False)
            text = " ".join((done.output + done.stderr).split())
            assert done.exit_code == 1, text
            assert all(words in text for words in WORDS), text
