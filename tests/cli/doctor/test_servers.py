"""Name servers and brokers, by what they say."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.doctor import servers
from rocketmq_spark.cli.doctor.findings import Level
from rocketmq_spark.errors import (
    AccessDenied,
    CallTimeout,
    CertificateRefused,
    ConnectionLost,
    NotSupported,
    ServerFault,
)
from rocketmq_spark.model import BrokerData

NOW_MS = 1_800_000_000_000
LOST = ConnectionLost("cannot connect", "h:1", remark="refused")


def data(name: str, **addresses: str) -> BrokerData:
    return BrokerData(name, "c", {int(number[1:]): address for number, address in addresses.items()})


@pytest.mark.parametrize(
    ("error", "level", "words"),
    [
        (None, Level.OK, "h:1 answers, in TLS"),
        (NotSupported("no"), Level.OK, "is a Proxy"),
        (AccessDenied("no"), Level.ADVICE, "does not let this user list brokers"),
        (LOST, Level.BROKEN, "h:1 cannot be used: cannot connect: refused"),
        (CertificateRefused("not trusted"), Level.BROKEN, "not trusted"),
    ],
)
def test_a_name_server(error, level, words) -> None:
    found = servers.name_server_finding("h:1", error, tls=True)
    assert found.level is level
    assert words in found.text
    assert ("option 'tls' asks for" in (found.remedy or "")) == (error is LOST)


def test_a_name_server_at_kafkas_port() -> None:
    assert "h:9092 has Kafka's usual port" in (servers.name_server_finding("h:9092", LOST, tls=False).remedy or "")


def test_who_is_registered() -> None:
    assert servers.brokers_finding({}).level is Level.BROKEN
    whole = {"a": data("a", _0="h:1", _1="h:2")}
    assert servers.brokers_finding(whole)[1:3] == (Level.OK, "a; 1 slaves. Brokers that are down are not listed")
    orphaned = servers.brokers_finding({**whole, "b": data("b", _1="h:3")})
    assert (orphaned.level, orphaned.text.split()[0]) == (Level.BROKEN, "b")


def test_an_address_that_cannot_be_reached_says_addressMap() -> None:
    found = servers.broker_address_finding(
        "a", "172.17.0.2:10911", "172.17.0.2:10911", CallTimeout("no answer in time"), False
    )
    assert (found.check, found.level) == ("broker a", Level.BROKEN)
    assert "advertises 172.17.0.2:10911, which cannot be reached from here: no answer in time" in found.text
    assert '-o \'addressMap={"172.17.0.2:10911":"<reachable host>:10911"}\'' in (found.remedy or "")
    mapped = servers.broker_address_finding("a", "172.17.0.2:10911", "localhost:1", None, False)
    assert mapped[1:3] == (Level.OK, "172.17.0.2:10911, dialled as localhost:1 answers")


def test_a_time_out_of_a_proxy_is_no_unreachable_address() -> None:
    (slow,) = servers.advertised_address_findings("p:1", {"a": CallTimeout("no answer in time", "p:1")}, False)
    errors = dict.fromkeys("ab", CallTimeout("cannot connect: no progress in time"))
    (dead,) = servers.advertised_address_findings("p:1", errors, False)
    assert slow.text == "p:1 does not reach broker a: no answer in time (at p:1)"
    assert dead.text.startswith("advertises p:1, which cannot be reached from here")


STOCK = {
    "maxTransferCountOnMessageInMemory": "32", "maxTransferBytesOnMessageInMemory": "262144",
    "maxTransferCountOnMessageInDisk": "8", "maxTransferBytesOnMessageInDisk": "65536",
}  # fmt: skip


def test_settings_that_make_reads_slow_say_the_lines() -> None:
    warm, cold = servers.settings_findings("a", STOCK, False)
    assert warm[1:3] == (Level.ADVICE, "a pull gives at most 32 messages or 262144 bytes")
    assert (warm.remedy or "").startswith(
        "In broker.conf maxTransferCountOnMessageInMemory=1024, maxTransferBytesOnMessageInMemory=4194304: "
    )
    assert cold.text == "a pull of old messages gives at most 8 messages or 65536 bytes"
    raised = {**servers.PULL_MINIMUMS, **servers.COLD_PULL_MINIMUMS}
    assert list(servers.settings_findings("a", {name: str(value) for name, value in raised.items()}, False)) == []
    assert list(servers.settings_findings("a", {}, True)) == []


def test_settings_that_are_not_told_are_not_judged() -> None:
    found = servers.unreadable_settings_finding("a", AccessDenied("access denied", remark="check signature failed"))
    assert (found.level, found.text) == (Level.ADVICE, "does not report its settings: check signature failed")
    locked = servers.unknown_user_finding("a", AccessDenied("access denied", remark="check signature failed"))
    assert (locked.level, locked.text) == (Level.BROKEN, "does not know this user: check signature failed")
    state = servers.unreadable_state_finding("a", ServerFault("refused", remark="java.util.NoSuchElementException"))
    assert (state.level, state.text.rpartition(": ")[2]) == (Level.ADVICE, "java.util.NoSuchElementException")


def test_index_and_sql() -> None:
    off = {"messageIndexEnable": "false", "enablePropertyFilter": "false"}
    assert [f.level for f in servers.settings_findings("a", off, False)] == [Level.ADVICE, Level.ADVICE]
    assert [f.level for f in servers.settings_findings("a", off, True)] == [Level.ADVICE, Level.BROKEN]
    on = {"messageIndexEnable": "true", "enablePropertyFilter": "true"}
    assert list(servers.settings_findings("a", on, True)) == []


@pytest.mark.parametrize(
    ("log", "queue", "level"),
    [
        ("0.0", "0.0", Level.OK),
        ("0.42", "0.40", Level.OK), ("0.85", "0.1", Level.OK), ("0.86", "0.1", Level.ADVICE), ("0.1", "0.9", Level.ADVICE),
        ("0.1", "0.91", Level.BROKEN),
    ],
)  # fmt: skip
def test_disks(log: str, queue: str, level: Level) -> None:
    found = servers.disk_finding("a", {"commitLogDiskRatio": log, "consumeQueueDiskRatio": queue})
    assert found is not None
    assert found.level is level
    assert servers.disk_finding("a", {}) is None
    assert servers.disk_finding("a", {"commitLogDiskRatio": "-1", "consumeQueueDiskRatio": "-1"}) is None


@pytest.mark.parametrize(
    ("ahead_ms", "level", "words"),
    [
        (0, Level.OK, "agree"), (5_000, Level.OK, "agree"), (-5_000, Level.OK, "agree"),
        (90_000, Level.ADVICE, "1 m 30 s ahead of ours"), (-90_000, Level.ADVICE, "1 m 30 s behind ours"),
    ],
)  # fmt: skip
def test_clocks(ahead_ms: int, level: Level, words: str) -> None:
    up_ms = ((1 * 24 + 2) * 60 + 3) * 60_000 + 4_000
    runtime = {
        "bootTimestamp": str(NOW_MS + ahead_ms - up_ms),
        "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]",
    }
    found = servers.clock_finding("a", runtime, NOW_MS)
    assert found is not None
    assert found.level is level
    assert words in found.text
    assert servers.clock_finding("a", {**runtime, "runtime": "later"}, NOW_MS) is None
    assert servers.clock_finding("a", {"runtime": runtime["runtime"]}, NOW_MS) is None


def test_releases() -> None:
    assert [
        (servers.version_finding("a", {"brokerVersionDesc": text}) or pytest.fail(text)).level
        for text in ("V5_5_0", "V4_9_7")
    ] == [Level.OK, Level.ADVICE]
    assert servers.version_finding("a", {}) is None
