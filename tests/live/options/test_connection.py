"""How servers are found and reached, and how long that may take."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import CallTimeout, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from tests.reading import Run, batch_reader, bodies, feed, plan, read, rows


class HangUp:
    """Takes connections and closes each at once; ``times`` says when."""

    def __enter__(self) -> HangUp:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken = self._sock.accept()[0]
                self.times.append(time.monotonic())  # before the client can notice
                taken.close()

    def __exit__(self, *error: object) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(60)


@pytest.fixture
def hang_up() -> Iterator[HangUp]:
    with HangUp() as server:
        yield server


def test_name_server__the_next_one_is_tried_when_one_fails(rocketmq, topic, nobody):
    sent = set(feed(rocketmq, topic, 4))
    real = rocketmq.name_server
    for servers in (f"{nobody};{real}", f"{real},{nobody}", real):
        for _ in range(3):
            assert Counter(bodies(read(servers, subscribe=topic))) == Counter(sent)
    with pytest.raises(ConnectionLost, match="nameServer") as e:
        read(nobody, subscribe=topic, numRetries=0)
    assert nobody in str(e.value)


def test_name_server__is_required_and_has_an_alias(rocketmq, topic):
    with pytest.raises(OptionError, match="'nameServer' is required"):
        batch_reader("", nameServer=None, subscribe=topic)
    assert plan("", nameServer=None, namesrvAddr=rocketmq.name_server, subscribe=topic) == []


def test_address_map__leads_to_the_reachable_address(rocketmq, topic, make_tap, nobody):
    sent = set(feed(rocketmq, topic, 4))
    advertised = rocketmq.address("broker-a")
    tap = make_tap(advertised)
    found = read(rocketmq, subscribe=topic, addressMap={advertised: tap.address})
    assert Counter(bodies(found)) == Counter(sent)
    assert tap.field("topic", Request.GET_TOPIC_STATS_INFO) == {topic}
    assert tap.field("topic", Request.PULL_MESSAGE) == {topic}
    with pytest.raises(RocketMQError):
        read(rocketmq, subscribe=topic, addressMap={advertised: nobody}, numRetries=0)


def test_connect_timeout__ends_wait_for_unresponsive_port(black_hole):
    for wait_s in (0.2, 3.5):  # the second is longer than the default
        started = time.monotonic()
        with pytest.raises(RocketMQError, match="connect"):
            plan(black_hole, subscribe="t", connectTimeout=f"{wait_s}s", requestTimeout="200s", numRetries=0)
        assert wait_s <= time.monotonic() - started < 100


def test_max_connections__are_the_most_of_a_client(rocketmq, topic, caplog):
    """The name server and the broker take turns. The limit is logged once for each client."""
    session.close_all()
    sent = feed(rocketmq, topic, 4)
    assert Counter(bodies(read(rocketmq, subscribe=topic, maxConnections=1))) == Counter(sent)
    assert "this client has 1 connections, which is its limit (option 'maxConnections')" in caplog.text


def test_request_timeout__ends_the_wait_for_an_answer(rocketmq, topic, make_proxy):
    proxy = make_proxy(rocketmq.name_server)
    proxy.black_hole()
    for wait_s in (0.2, 3.5):  # the second is longer than the default
        started = time.monotonic()
        with pytest.raises(CallTimeout):
            plan(proxy.address, subscribe=topic, requestTimeout=f"{wait_s}s", numRetries=0)
        assert time.monotonic() - started >= wait_s


def test_num_retries__of_questions_that_fail(hang_up):
    seen = []
    for retries in (0, 1, 4):
        before = len(hang_up.times)
        with pytest.raises(ConnectionLost):
            plan(hang_up.address, subscribe="t", numRetries=retries, retryInterval="10ms")
        seen.append(len(hang_up.times) - before)
    once = seen[0]
    assert seen == [once, 2 * once, 5 * once]
    assert once, "nobody came"


def test_num_retries__survive_a_moment_without_name_server(rocketmq, topic, make_proxy):
    sent = set(feed(rocketmq, topic, 4))
    proxy = make_proxy(rocketmq.name_server)
    proxy.swallows = 2
    found = read(proxy.address, subscribe=topic, requestTimeout="400ms", numRetries=20, retryInterval="50ms")
    assert Counter(bodies(found)) == Counter(sent)
    assert proxy.swallows == 0, "nobody missed it"


def test_retry_interval__is_the_first_pause_and_doubles(hang_up):
    with pytest.raises(ConnectionLost):
        plan(hang_up.address, subscribe="t", numRetries=3, retryInterval="200ms")
    times, tries = hang_up.times, 4
    once, left = divmod(len(times), tries)
    assert (once > 0, left) == (True, 0)
    pauses = [times[n * once] - times[n * once - 1] for n in range(1, tries)]
    # With jitter: each from the upper half of 200, 400 and 800 ms.
    assert [low <= pause for low, pause in zip((0.1, 0.2, 0.4), pauses, strict=True)] == [True] * 3


def test_route_refresh__is_how_old_a_route_may_be(rocketmq, make_topic):
    topic = make_topic(queues=1)
    # Clients of equal connection options share their routes: this one has its own.
    lazy = Run(rocketmq, subscribe=topic, routeRefresh="1h", connectTimeout="7s")
    eager = Run(rocketmq, subscribe=topic, routeRefresh=0)
    rocketmq.create_topic(topic, 2, resize=True)
    feed(rocketmq, topic, 3, queues=[0])
    lazy.until(lambda: lazy.read)
    assert {queue.queue_id for queue in lazy.positions} == {0}
    eager.until(lambda: len(eager.positions) == 2)


def test_transport__is_remoting_and_grpc_is_refused(rocketmq, topic):
    sent = set(feed(rocketmq, topic, 4))
    assert Counter(bodies(read(rocketmq, subscribe=topic, transport="Remoting"))) == Counter(sent)
    with pytest.raises(OptionError, match="transport"):
        read(rocketmq, subscribe=topic, transport="grpc")


def test_namespace__is_prefixed_to_topics_and_groups(rocketmq, make_topic, make_tap):
    plain = make_topic(queues=2)
    rocketmq.create_topic(f"shop%{plain}", 2)
    inside, outside = set(feed(rocketmq, f"shop%{plain}", 4)), set(feed(rocketmq, plain, 4))
    tap = make_tap(rocketmq.address("broker-a"))
    mapped = {rocketmq.address("broker-a"): tap.address}
    found = read(rocketmq, subscribe=plain, namespace="shop", group="readers", addressMap=mapped)
    assert Counter(bodies(found)) == Counter(inside)
    assert {row["topic"] for row in found} == {plain}
    assert tap.field("consumerGroup", Request.PULL_MESSAGE) == {"shop%readers"}
    assert Counter(bodies(read(rocketmq, subscribePattern=plain, namespace="shop"))) == Counter(inside)
    assert Counter(bodies(read(rocketmq, subscribe=plain))) == Counter(outside)


def test_namespace__holds_for_streams_and_their_group(rocketmq, make_topic):
    plain = make_topic(queues=1)
    rocketmq.create_topic(f"shop%{plain}", 1)
    group = f"g-{plain}"
    run = Run(rocketmq, subscribe=plain, namespace="shop", group=group)
    sent = feed(rocketmq, f"shop%{plain}", 4)
    run.drain(sent)
    run.batch()
    assert {queue.topic for queue in run.positions} == {plain}
    progress = rocketmq.admin.consume_stats(f"shop%{group}", f"shop%{plain}")
    assert [one.consumer_offset for one in progress.values()] == [4]


def test_group__is_named_in_pulls_and_gets_the_offsets(rocketmq, topic, make_tap):
    sent = feed(rocketmq, topic, 8)
    address = rocketmq.address("broker-a")
    for named in ({}, {"group": f"g-{topic}"}):
        tap = make_tap(address)
        run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", addressMap={address: tap.address}, **named)
        run.drain(sent)
        run.batch()
        assert tap.field("consumerGroup", Request.PULL_MESSAGE) == {named.get("group", "rocketmq_spark")}
        committed = tap.field("commitOffset", Request.UPDATE_CONSUMER_OFFSET)
        assert committed == ({"1"} | ({"0"} & committed) if named else set())


@pytest.fixture
def tapped(rocketmq: LocalBroker, make_topic, make_tap):
    """Two thousand messages of a kilobyte in one queue, and a reader behind a tap."""
    topic = make_topic(queues=1)
    feed(rocketmq, topic, 2000)
    address = rocketmq.address("broker-a")

    def pulls(**options):
        tap = make_tap(address)
        reader = batch_reader(rocketmq, subscribe=topic, addressMap={address: tap.address}, **options)
        assert len(rows(reader, reader.partitions())) == 2000
        return {int(count) for count in tap.field("maxMsgNums", Request.PULL_MESSAGE)}

    return pulls


def test_pull_batch_size__is_the_most_a_pull_asks_for(tapped):
    assert max(tapped(pullBatchSize=5)) == 5
    assert max(tapped()) >= 32


def test_proxy_endpoint__cannot_be_read_from(rocketmq, topic):
    with pytest.raises(OptionError, match=r"reads ranges of offsets.*UNIMPLEMENTED.*Remoting port of a Proxy"):
        read(rocketmq, subscribe=topic, transport="grpc", proxyEndpoint="127.0.0.1:8081")
    with pytest.raises(OptionError, match="'proxyEndpoint' has no effect"):
        read(rocketmq, subscribe=topic, proxyEndpoint="127.0.0.1:8081")


def test_tls_server_name__means_nothing_to_who_reads(rocketmq, topic):
    with pytest.raises(OptionError, match=r"'tlsServerName' has no effect.*tlsCheckHostname"):
        read(rocketmq, subscribe=topic, tlsServerName="broker.example")
