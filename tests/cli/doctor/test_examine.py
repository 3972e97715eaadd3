"""Each check on servers that have the fault: one at a time, everything else being well."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rocketmq_spark import Consumer, PullConsumer
from rocketmq_spark.admin.groups import QueuePositions
from rocketmq_spark.base import extras
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.doctor import command
from rocketmq_spark.cli.doctor.command import Subject
from rocketmq_spark.cli.doctor.findings import Finding, Level
from rocketmq_spark.errors import AccessDenied, CallTimeout
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.admin import QueueLag
from rocketmq_spark.remoting.advertised import remedy
from rocketmq_spark.spark.sink import exactly_once
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Peer
from tests.cli.test_lag import feed
from tests.fix_clusters import ADMIN, WITHOUT_TIMERS, Certificates, Secured
from tests.helpers import awaited, freeze, killed
from tests.live.writes import sink_options
from tests.mockbroker import NO_ROUTE, MockBroker, cluster, eventually, of_proxy, ok, refuse, route, topic_config
from tests.reading import names
from tests.sink.test_notes import checkpoint as query
from tests.source.test_checkpoint import entry
from tests.users import IS_ROOT, OTHER

SERVERS = Subject()


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be said of this machine is tested where it is said."""
    monkeypatch.setattr(command, "check_machine", lambda: iter(()))


def doctor(name_server: str, subject: Subject = SERVERS, **options: object) -> list[Finding]:
    """What is found once brokers that have just started tell how they are."""
    given = {"name_server": name_server, "num_retries": 0, "request_timeout": "30s", **options}
    return awaited(
        lambda: list(command.examine(Target(given), subject)),
        lambda found: not any("its version, disk and clock" in one.text for one in found),
    )


def bad(found: list[Finding]) -> list[tuple[str, Level]]:
    """What is not well, but for the limits of stock brokers, which all of them have."""
    return [(one.check, one.level) for one in found if one.level is not Level.OK and "at most" not in one.text]


class TestOfServers:
    def test_nobody_at_the_address(self) -> None:
        (found,) = doctor("127.0.0.1:1")
        assert (found.check, found.level) == ("name server", Level.BROKEN)
        assert "refused" in found.text
        (unknown,) = doctor("no.such.host.invalid:9876")
        assert "no.such.host.invalid:9876 cannot be used" in unknown.text
        assert "DNS" in (unknown.remedy or "")

    def test_options_that_are_wrong(self) -> None:
        (found,) = doctor("127.0.0.1:1", pull_depth="many")
        assert (found.check, found.level, "pullDepth" in found.text) == ("options", Level.BROKEN, True)

    def test_one_of_two_name_servers(self, rocketmq: LocalBroker) -> None:
        assert bad(doctor(f"127.0.0.1:1;{rocketmq.name_server}")) == [("name server", Level.BROKEN)]

    def test_a_broker_that_advertises_what_cannot_be_reached(self) -> None:
        table = b'{"brokerAddrTable":{"b":{"brokerName":"b","cluster":"c","brokerAddrs":{0:"127.0.0.1:1"}}}}'
        with MockBroker({Request.GET_BROKER_CLUSTER_INFO: ok(table)}) as name_server:
            found = doctor(name_server.address)
            assert bad(found) == [("broker b", Level.BROKEN)]
            assert "option 'addressMap'" in (found[-1].remedy or "")
            runtime = {
                "commitLogDiskRatio": "0.95", "bootTimestamp": "1000", "brokerVersionDesc": "V4_9_4",
                "runtime": "[ 0 days, 0 hours, 0 minutes, 1 seconds ]",
            }  # fmt: skip
            name_server.on(Request.GET_BROKER_RUNTIME_INFO, ok(json.dumps({"table": runtime}).encode()))
            mapped = doctor(name_server.address, address_map={"127.0.0.1:1": name_server.address})
            assert [(one.check, one.level) for one in mapped[2:]] == [
                ("broker b", Level.OK), ("broker b", Level.ADVICE), ("broker b", Level.BROKEN), ("broker b", Level.ADVICE),
                ("broker b", Level.ADVICE),
            ]  # fmt: skip
            words = ["V4_9_4", "95% full", "behind ours", "does not report its settings"]
            assert all(text in one.text for text, one in zip(words, mapped[3:], strict=True))

    def test_settings_with_passwords_are_not_requested_in_clear_text(self) -> None:
        both = cluster({name: {"0": f"10.0.0.{i}:10911"} for i, name in enumerate("ab")})
        with MockBroker({Request.GET_BROKER_CLUSTER_INFO: both}) as broker:
            broker.on(Request.GET_BROKER_RUNTIME_INFO, ok(b'{"table":{"commitLogDiskRatio":"0.1"}}'))
            broker.on(Request.GET_BROKER_CONFIG, ok(b"enablePropertyFilter=false\n"))
            broker_address = broker.address.replace("127.0.0.1", "0.0.0.0")
            found = doctor(
                broker.address, address_map={f"10.0.0.{i}:10911": broker_address for i in range(2)}, tls="false"
            )
            assert bad(found) == [("settings of brokers", Level.ADVICE)]
            (said,) = [one for one in found if "retention not known without TLS" in one.text]
            assert "option 'tls'" in (said.remedy or "")
            assert broker.seen(Request.GET_BROKER_CONFIG) == []

    def test_a_slave_that_cannot_be_reached(self) -> None:
        table = '{"brokerAddrTable":{"b":{"brokerName":"b","cluster":"c","brokerAddrs":{0:"%s",1:"127.0.0.1:1"}}}}'
        with MockBroker({Request.GET_BROKER_RUNTIME_INFO: ok(b'{"table":{}}')}) as master:
            master.on(Request.GET_BROKER_CLUSTER_INFO, ok((table % master.address).encode()))
            (found,) = [one for one in doctor(master.address) if one.level is Level.BROKEN]
        assert (found.check, "advertises 127.0.0.1:1, which" in found.text) == ("broker b", True)

    def test_no_broker_and_a_broker_without_master(self) -> None:
        with MockBroker({Request.GET_BROKER_CLUSTER_INFO: ok(b"{}")}) as name_server:
            assert bad(doctor(name_server.address)) == [("brokers", Level.BROKEN)]

    def test_a_proxy(self) -> None:
        with MockBroker({Request.GET_ROUTEINFO_BY_TOPIC: NO_ROUTE}) as proxy:
            (found,) = doctor(proxy.address)
            assert (found.level, "is a Proxy" in found.text) == (Level.OK, True)

    def test_what_a_proxy_advertises(self, nobody: str) -> None:
        with MockBroker({Request.GET_ROUTEINFO_BY_TOPIC: of_proxy(route(1, {"a": nobody, "b": nobody}))}) as proxy:
            proxy.on(Request.GET_MAX_OFFSET, of_proxy(ok(offset=1)))
            server, advertised = doctor(proxy.address)
            assert (server.level, advertised.check, advertised.level) == (Level.OK, "Proxy", Level.BROKEN)
            assert f"advertises {nobody}, which cannot be reached" in advertised.text
            assert advertised.remedy == remedy([nobody], Peer.PROXY)
            _, mapped = doctor(proxy.address, address_map="nameServer")
            assert (mapped.level, mapped.text) == (Level.OK, f"{proxy.address} answers for its brokers")

    def test_a_proxy_that_does_not_reach_a_broker(self) -> None:
        with MockBroker() as proxy:
            proxy.on(Request.GET_ROUTEINFO_BY_TOPIC, of_proxy(route(1, {"a": proxy.address, "b": proxy.address})))
            away, there = of_proxy(refuse(Response.SYSTEM_ERROR, "connect to broker failed")), of_proxy(ok(offset=1))
            proxy.on(Request.GET_MAX_OFFSET, lambda call: away if call.ext("bname") == "a" else there)
            _, found = doctor(proxy.address)
        assert (found.check, found.level) == ("Proxy", Level.BROKEN)
        assert f"{proxy.address} does not reach broker a: " in found.text
        assert "connect to broker failed" in found.text

    def test_a_proxy_that_denies_access_reaches_its_brokers(self) -> None:
        with MockBroker() as proxy:
            proxy.on(Request.GET_ROUTEINFO_BY_TOPIC, of_proxy(route(1, {"a": proxy.address})))
            proxy.on(Request.GET_MAX_OFFSET, of_proxy(refuse(Response.SYSTEM_ERROR, "User:x not found.")))
            _, found = doctor(proxy.address)
        assert (found.level, found.text) == (Level.OK, f"{proxy.address} answers for its brokers")

    def test_a_proxy_whose_addresses_need_a_topic(self) -> None:
        with MockBroker({Request.GET_ROUTEINFO_BY_TOPIC: of_proxy(NO_ROUTE)}) as proxy:
            _, found = doctor(proxy.address)
        assert (found.check, found.level, found.remedy) == ("Proxy", Level.ADVICE, "Name a topic with --topic")

    def test_a_group_behind_a_proxy_by_the_offsets_of_its_topics(self) -> None:
        with MockBroker({Request.QUERY_CONSUMER_OFFSET: of_proxy(ok(offset=5))}) as proxy:
            proxy.on(Request.GET_ROUTEINFO_BY_TOPIC, of_proxy(route(1, {"a": proxy.address})))
            proxy.on(Request.GET_MIN_OFFSET, of_proxy(ok(offset=0)))
            proxy.on(Request.GET_MAX_OFFSET, of_proxy(ok(offset=9)))
            proxy.on(
                Request.PULL_MESSAGE,
                of_proxy(refuse(Response.PULL_NOT_FOUND, nextBeginOffset=9, minOffset=0, maxOffset=9)),
            )
            found = [one for one in doctor(proxy.address, Subject(["t"], "g")) if one.check == "group g"]
            assert [one.level for one in found] == [Level.ADVICE, Level.OK]
            assert "the server is a Proxy" in found[0].text
            assert "4 messages" in found[1].text
            (_, unnamed) = [one for one in doctor(proxy.address, Subject((), "g")) if one.check == "group g"]
            assert "--topic" in (unnamed.remedy or "")

    def test_the_name_server_in_place_of_a_broker(self, rocketmq: LocalBroker) -> None:
        (_, listed, of_broker) = doctor(rocketmq.name_server, address_map="nameServer")
        assert (listed.level, of_broker.level) == (Level.OK, Level.BROKEN)
        assert "is a name server" in of_broker.text
        assert "port-forward per broker" in (of_broker.remedy or "")

    def test_a_broker_given_as_name_server(self, rocketmq: LocalBroker) -> None:
        address = rocketmq.address("broker-a")
        (found,) = doctor(address)
        assert (found.check, found.level) == ("name server", Level.BROKEN)
        assert f"{address} is a broker's port" in found.text
        assert "port of the name server, 9876" in (found.remedy or "")
        assert bad(doctor(f"{address};{rocketmq.name_server}")) == [("name server", Level.BROKEN)]

    def test_a_broker_that_hangs(self, pair: LocalBroker) -> None:
        assert bad(doctor(pair.name_server)) == []
        pid = pair.pid("broker-b")
        assert pid is not None
        freeze(pid)
        try:
            found = doctor(pair.name_server, request_timeout="1s")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ("broker broker-b", Level.BROKEN) in bad(found)

    def test_certificates(self, elsewhere: LocalBroker, certs: Certificates) -> None:
        """Of an authority that is not trusted, then for another name; then all is well."""
        (untrusted,) = doctor(elsewhere.name_server, tls=True)
        assert (untrusted.level, "certificate" in untrusted.text) == (Level.BROKEN, True)
        (other,) = doctor(elsewhere.name_server, tls=True, tls_ca_file=certs.ca)
        assert (other.level, "certificate" in other.text) == (Level.BROKEN, True)
        well = doctor(elsewhere.name_server, tls=True, tls_ca_file=certs.ca, tls_check_hostname=False)
        assert bad(well) == []
        assert "answers, in TLS" in well[0].text

    def test_no_tls_where_it_is_asked_for(self, rocketmq: LocalBroker, certs: Certificates) -> None:
        (found,) = doctor(rocketmq.name_server, tls=True, tls_ca_file=certs.ca)
        assert found.level is Level.BROKEN


@pytest.fixture(scope="module")
def sick() -> Iterator[LocalBroker]:
    """A broker whose settings are against its readers."""
    conf = {**WITHOUT_TIMERS, "messageIndexEnable": False, "enablePropertyFilter": False, "fileReservedTime": 1}
    with LocalBroker(conf=conf, quiet=True) as mq:
        yield mq


def test_settings(sick: LocalBroker) -> None:
    found = doctor(sick.name_server)
    assert [one for one in found if one.level is Level.BROKEN] == []
    assert bad(found) == [("broker broker-a", Level.ADVICE)] * 2
    words = " ".join(one.text for one in found)
    assert all(text in words for text in ("32 messages or 262144 bytes", "not indexed", "SQL filters are switched off"))
    assert ("broker broker-a", Level.BROKEN) in bad(doctor(sick.name_server, sql="a > 1", subscribe="t"))
    sick.admin.update_broker_config(
        "broker-a",
        {"maxTransferCountOnMessageInMemory": "1024", "maxTransferBytesOnMessageInMemory": "4194304"},
    )
    assert "262144" not in " ".join(one.text for one in doctor(sick.name_server))


def test_a_clock_that_is_another(rocketmq: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = command.time.time_ns
    monkeypatch.setattr(command.time, "time_ns", lambda: now_ns() + 3_600_000_000_000)
    (found,) = [one for one in doctor(rocketmq.name_server) if "clock" in one.text]
    assert (found.level, "behind ours" in found.text) == (Level.ADVICE, True)


class TestOfTopics:
    def test_one_that_is_missing_or_may_not_be_read(self, rocketmq: LocalBroker) -> None:
        (topic,) = names(1, "doctor")
        (missing,) = doctor(rocketmq.name_server, Subject([topic]))[-1:]
        assert (missing.check, missing.level) == (f"topic {topic}", Level.BROKEN)
        rocketmq.admin.create_topic(topic, 2, perm=2, attributes={"message.type": "FIFO"})
        found = bad(doctor(rocketmq.name_server, Subject([topic])))
        assert found == [(f"topic {topic}", Level.BROKEN), (f"topic {topic}", Level.ADVICE)]

    @pytest.mark.parametrize(
        ("grants", "expected"),
        [
            (("Sub,Get,Pub", "Sub"), []),
            (("Sub,Get", "Sub"), [("rights sink", Level.ADVICE)]),
            (("Get,Pub", "Sub"), [("rights source", Level.BROKEN)]),
            (("Sub,Get,Pub", None), [("rights source", Level.BROKEN)]),
        ],
    )
    def test_rights(self, secured: Secured, grants: tuple[str, str | None], expected: list[tuple[str, Level]]) -> None:
        (topic,) = names(1, "rights")
        group = f"g-{topic}"
        secured.admin.create_topic(topic, 2)
        secured.admin.create_group(group)
        entries = [(f"Topic:{topic}", grants[0])] + ([(f"Group:{group}", grants[1])] if grants[1] else [])
        user = secured.user(f"u-{topic}", *entries)
        found = doctor(secured.mq.name_server, Subject([topic]), group=group, **user)
        assert [one for one in bad(found) if one[0].startswith("rights")] == expected
        assert user["secretKey"] not in str(found)
        assert {b.max_offset for b in secured.admin.describe_topic(topic).values()} == {0}

    def test_an_operators_reset_stays_for_the_groups_next_pull(self, rocketmq: LocalBroker) -> None:
        (topic,) = names(1, "reset")
        group = f"g-{topic}"
        rocketmq.admin.create_topic(topic, 2)
        rocketmq.admin.create_group(group)
        calls, address = rocketmq.admin.offset_reader.rpc_client, rocketmq.address("broker-a")
        fields = {"group": group, "topic": topic, "timestamp": 0, "isForce": True, "queueId": -1}
        calls.request(address, rpc.INVOKE_BROKER_TO_RESET_OFFSET.request(**fields))
        assert bad(doctor(rocketmq.name_server, Subject([topic]), group=group)) == []
        pull = rpc.PULL_MESSAGE.request(
            topic=topic, consumerGroup=group, queueId=0, queueOffset=0, maxMsgNums=1, subscription="*",
            expressionType="TAG", **rpc.IMMEDIATE_PULL,
        )  # fmt: skip
        answer = calls.invoke(address, pull, Deadline.after(30))
        assert answer.code == Response.PULL_OFFSET_MOVED
        assert rpc.PULL_MESSAGE.answer(answer)["nextBeginOffset"] == 0

    def test_keys_that_are_wrong(self, secured: Secured) -> None:
        found = doctor(secured.mq.name_server, **{**ADMIN, "secretKey": "guess"})
        assert "guess" not in str(found)
        assert bad(found) == [("broker broker-a", Level.BROKEN)]
        assert "check signature failed" in " ".join(one.text for one in found)

    def test_an_order_that_an_operator_mistyped(self) -> None:
        with MockBroker({Request.GET_TOPIC_CONFIG: topic_config()}) as server:
            server.on(
                Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": server.address}, orderTopicConf="broker-a:4;b")
            )
            target = Target({"name_server": server.address, "num_retries": 0, "request_timeout": "1s"})
            found = list(command.check_topic(target.client(), target.options(), "t", None))
        (one,) = [one for one in found if "the route has orderTopicConf 'broker-a:4;b'; expected" in one.text]
        assert (one.level, one.remedy) == (Level.BROKEN, "Correct it with RocketMQ's own tool: mqadmin updateOrderConf")


class TestOfReaders:
    def test_members_that_do_not_want_the_same(self, rocketmq: LocalBroker, topic: str) -> None:
        group = f"g{uuid.uuid4().hex[:6]}"
        said = threading.Event()
        feed(rocketmq, topic, 1)
        members = [
            # Of other connection options, and so with clients, of their own.
            Consumer(
                name_server=rocketmq.name_server, group=group, consume_from_where="earliest", request_timeout=timeout
            )
            for timeout in ("3s", "4s")
        ]
        try:
            for member, tags in zip(members, ("a", "b"), strict=True):
                member.subscribe(topic, tags)
                member.start(lambda messages, context: said.set())
            found = awaited(
                lambda: doctor(rocketmq.name_server, Subject(group=group)),
                lambda found: any("have different subscriptions" in one.text for one in found),
            )
        finally:
            for member in members:
                member.stop()
        assert (f"group {group}", Level.BROKEN) in bad(found)

    def test_a_group_that_is_behind_what_is_kept(self, sick: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        (topic,) = names(1, "late")
        sick.create_topic(topic, 2)
        feed(sick, topic, 4)
        group = f"g-{topic}"
        with PullConsumer(name_server=sick.name_server, group=group, auto_commit=False) as consumer:
            queue = MessageQueue(topic, "broker-a", 1)
            consumer.assign([queue])
            consumer.seek(queue, 1)
            consumer.commit()
        soon = doctor(sick.name_server, Subject(group=group))
        assert (soon[-1].level, "3 messages behind" in soon[-1].text) == (Level.OK, True)
        now_ns = command.time.time_ns
        monkeypatch.setattr(command.time, "time_ns", lambda: now_ns() + 45 * 60_000_000_000)
        later = doctor(sick.name_server, Subject(group=group))
        assert (later[-1].level, "kept for 1 h 0 m" in later[-1].text) == (Level.ADVICE, True)

    @pytest.mark.parametrize(
        ("hours", "kept"),
        [
            ({"a": "5", "b": "48"}, "; messages are kept for 5 h 0 m"),
            ({"a": "48", "b": "5"}, "; messages are kept for 5 h 0 m"),
            ({"a": None, "b": "72"}, "; messages are kept for 3 d 0 h"),
            ({"a": "denied", "b": "72"}, "; messages are kept for 3 d 0 h"),
            ({"a": None, "b": None}, ""),
            ({"a": "abc", "b": "72"}, "; messages are kept for 3 d 0 h"),
            ({"a": "9" * 5000, "b": "-1"}, ""),
        ],
    )
    def test_the_shortest_known_retention_counts(self, hours: dict[str, str | None], kept: str) -> None:
        def told(name: str) -> dict[str, str]:
            said = hours[name]
            if said == "denied":
                raise AccessDenied("only administrators may ask for that")
            return {} if said is None else {"fileReservedTime": said}

        client: Any = SimpleNamespace(admin=SimpleNamespace(broker_config=told))
        look = QueuePositions([QueueLag(MessageQueue("t", name, 0), 0, 7, 7) for name in hours])
        found = command._lag_finding(client, "group g", look)
        assert (found.level, found.text) == (Level.OK, f"0 messages behind{kept}")

    def test_a_broker_that_does_not_say_how_far_a_reader_is(self) -> None:
        rows = [QueueLag(MessageQueue("t", "a", 0), 0, 7, 7)]
        found = command._lag_finding(Mock(), "group g", QueuePositions(rows, [CallTimeout("no answer in time", "h:1")]))
        assert (found.level, found.text) == (Level.BROKEN, "no answer in time (at h:1)")

    def test_a_group_that_nobody_knows(self, rocketmq: LocalBroker) -> None:
        found = doctor(rocketmq.name_server, Subject(group="nobody"))
        assert (found[-1].check, found[-1].level) == ("group nobody", Level.ADVICE)
        assert "rocketmq-spark offsets set nobody --topic TOPIC --to earliest" in (found[-1].remedy or "")

    def test_a_checkpoint(self, rocketmq: LocalBroker, topic: str, tmp_path: Path) -> None:
        (nothing,) = doctor(rocketmq.name_server, Subject(checkpoint=str(tmp_path)))[-1:]
        assert (nothing.level, "is not a checkpoint" in nothing.text) == (Level.BROKEN, True)
        feed(rocketmq, topic, 4)
        queue = MessageQueue(topic, "broker-a", 1)
        entry(tmp_path, 0, json.dumps(Offsets({queue: 3}).to_json()))
        assert bad(doctor(rocketmq.name_server, Subject(checkpoint=str(tmp_path)))) == []
        if IS_ROOT:  # that user's query may use it
            for path in (tmp_path, *tmp_path.rglob("*")):
                os.chown(path, OTHER, OTHER)
            found = doctor(rocketmq.name_server, Subject(checkpoint=str(tmp_path)))
            (theirs,) = [one for one in found if "belongs to" in one.text]
            assert (theirs.level, theirs.remedy) == (Level.ADVICE, "Run the query as that user")
            assert f"belongs to uid {OTHER}" in theirs.text
            assert bad(found) == [(f"checkpoint {tmp_path}", Level.ADVICE)]
            for path in (tmp_path, *tmp_path.rglob("*")):
                os.chown(path, 0, 0)
        tmp_path.chmod(0o777)
        (open_to_all,) = bad(doctor(rocketmq.name_server, Subject(checkpoint=str(tmp_path))))
        assert open_to_all == (f"checkpoint {tmp_path}", Level.BROKEN if os.geteuid() == 0 else Level.ADVICE)
        tmp_path.chmod(0o700)
        entry(tmp_path, 0, json.dumps(Offsets({queue: 30}).to_json()))
        assert bad(doctor(rocketmq.name_server, Subject(checkpoint=str(tmp_path)))) == [
            (f"checkpoint {tmp_path}", Level.BROKEN)
        ]

    def test_a_checkpoint_whose_broker_is_down(self, pair: LocalBroker, tmp_path: Path) -> None:
        """What cannot be asked for is not gone: nobody is to pass it over."""
        topic, alone = names(2, "down")
        pair.create_topic(topic, 2)
        pair.create_topic(alone, 1, broker="broker-b")
        positions = {MessageQueue(topic, name, number): 0 for name in pair.brokers for number in (0, 1)}
        entry(tmp_path, 0, json.dumps(Offsets({**positions, MessageQueue(alone, "broker-b", 0): 0}).to_json()))
        killed(pair, "broker-b")
        eventually(lambda: "broker-b" not in pair.admin.cluster(), 60)
        found = [
            one
            for one in doctor(pair.name_server, Subject(checkpoint=str(tmp_path)))
            if one.check == f"checkpoint {tmp_path}"
        ]
        assert [(one.level, one.text) for one in found if one.level is not Level.OK] == [
            (Level.BROKEN, "broker-b is not registered, and 3 of 5 queues wait for it")
        ]
        assert found[0].remedy == "Start it on its data; nothing is lost"
        assert "failOnDataLoss" not in str(found)

    def test_whether_topics_can_be_written_exactly_once(self, rocketmq: LocalBroker, tmp_path: Path) -> None:
        one, two, compacted = names(3, "once")
        for topic, attributes in ((one, None), (two, None), (compacted, {"cleanup.policy": "COMPACTION"})):
            rocketmq.create_topic(topic, 2, attributes=attributes)
        folder = query(tmp_path / "query")

        def said(*topics: str) -> tuple[Level, str]:
            found = doctor(rocketmq.name_server, Subject(topics, checkpoint=str(folder), exactly_once=True))[-1]
            assert found.check == "exactly-once"
            return found.level, found.text

        level, text = said(one, two)
        assert (level, f"{one}, {two}: 4 queues of broker-a" in text) == (Level.OK, True)
        assert "batch 0 is begun, without a note" in text
        exactly_once.plan_batch(
            sink_options(rocketmq.name_server, topic=one, deliveryGuarantee="exactly-once"), str(folder)
        )
        (folder / "commits").mkdir()
        (folder / "commits" / "0").write_text("v1\n{}")
        assert "batch 0 is finished, with a note" in said(one)[1]
        assert "compaction topic" in said(compacted)[1]
        (folder / "metadata").write_text("{}")
        assert (said(one)[0], "has no id" in said(one)[1]) == (Level.BROKEN, True)

    def test_what_no_sink_would_begin_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extras, "is_installed", lambda module: module != "xxhash")
        found = command.check_exactly_once(Target({"name_server": "127.0.0.1:1"}), Subject(["t"], exactly_once=True))
        assert (found.level, "xxhash, which hashes rows, is not installed" in found.text) == (Level.BROKEN, True)

    def test_a_user_who_may_write_and_not_read(self, secured: Secured) -> None:
        (topic,) = names(1, "once")
        secured.admin.create_topic(topic, 2)
        user = secured.user(f"u-{topic}", (f"Topic:{topic}", "Pub"))
        found = doctor(secured.mq.name_server, Subject([topic], exactly_once=True), **user)[-1]
        assert (found.check, found.level, "denied" in found.text) == ("exactly-once", Level.BROKEN, True)
