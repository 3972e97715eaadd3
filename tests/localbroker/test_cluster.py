"""LocalBroker as its users see it: what works inside the block, and what can be done to brokers."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.errors import BrokerNotFound, LocalBrokerError
from rocketmq_spark.localbroker import LocalBroker, processes
from rocketmq_spark.localbroker import cluster as cluster_room
from rocketmq_spark.localbroker.cluster_servers import Registration
from rocketmq_spark.localbroker.processes import Server
from rocketmq_spark.localbroker.servers import BrokerSpec
from tests.fix_clusters import WITHOUT_TIMERS
from tests.helpers import awaited
from tests.localbroker.messages import read, send
from tests.localbroker.processes import alive

BODIES = [b"message %d" % i for i in range(100)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalBroker]:
    """Two brokers that tests may break, and must mend."""
    with LocalBroker(brokers=2, conf={**WITHOUT_TIMERS, "maxMessageSize": 100_000, "fileReservedTime": "7"}) as mq:
        yield mq


def _resident_mib(pid: int | None) -> int:
    line = next(s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


def test_ready_means_messages_flow() -> None:
    before = int(time.time())
    with LocalBroker() as mq:
        mq.create_topic("t")
        send(mq.name_server, "t", *BODIES)
        assert read(mq.admin, "t") == BODIES
        assert len(mq.admin.route("t").readable_queues()) == 8
        read_until = re.search(r"Timer recover ok currReadTimerMs:(\d+)", mq.logs("broker-a"))
        assert read_until is not None
        assert int(read_until[1]) >= before * 1000, "the broker looks for timers of last week"


def test_small(record_property: pytest.RecordProperty) -> None:
    with LocalBroker() as mq:
        memory = {name: _resident_mib(mq.pid(name)) for name in ("namesrv", "broker-a")}
        disk_mib = int(subprocess.check_output(["du", "-sm", mq.data]).split()[0])
        unpacked = list((mq.data / "broker-a" / "tmp").iterdir())
    record_property("memory MiB", memory)
    record_property("disk MiB", disk_mib)
    assert sum(memory.values()) <= 450
    assert disk_mib < 100
    assert unpacked == []  # RocksDB's code is found where it was unpacked once


def test_names_addresses_and_processes(cluster: LocalBroker) -> None:
    assert cluster.running
    assert cluster.brokers == ["broker-a", "broker-b"]
    assert cluster.slaves == []
    shown = {name: data.master for name, data in cluster.admin.cluster().items()}
    assert shown == {name: cluster.address(name) for name in cluster.brokers}
    assert all(address.startswith("127.0.0.1:") for address in shown.values())
    assert all(alive(cluster.pid(name) or 0) for name in ("namesrv", *cluster.brokers))
    awaited(lambda: f"The broker[broker-b, {shown['broker-b']}] boot success" in cluster.logs("broker-b"))
    assert all(f"===== {name}" in cluster.logs() for name in ("namesrv", *cluster.brokers))


def test_configuration_lines_reach_every_broker(cluster: LocalBroker) -> None:
    for name in cluster.brokers:
        live = cluster.admin.broker_config(name)
        assert (live["maxMessageSize"], live["fileReservedTime"]) == ("100000", "7")
        assert live["mappedFileSizeCommitLog"] == str(64 << 20)


def test_topics_on_all_or_one(cluster: LocalBroker) -> None:
    cluster.create_topic("everywhere", queues=3)
    cluster.create_topic("somewhere", queues=2, broker="broker-b", attributes={"message.type": "FIFO"})
    assert len(cluster.admin.route("everywhere").readable_queues()) == 6
    assert {q.broker_name for q in cluster.admin.route("somewhere").readable_queues()} == {"broker-b"}
    assert cluster.admin.topic_config("somewhere", "broker-b").attributes == {"message.type": "FIFO"}
    cluster.create_topic("batches", broker="broker-a", batch=True)
    assert cluster.admin.topic_config("batches", "broker-a").attributes == {"queue.type": "BatchCQ"}
    with pytest.raises(BrokerNotFound, match="broker-z"):
        cluster.create_topic("nowhere", broker="broker-z")


def test_a_topic_is_created_again_with_as_many_queues_only(cluster: LocalBroker) -> None:
    """So that a script can be run again, and none hides messages by a slip."""
    cluster.create_topic("again", queues=4, broker="broker-a", batch=True)
    cluster.create_topic("again", queues=4, batch=True)
    queues = cluster.admin.queues_of("again")
    assert {name: data.read_queues for name, data in queues.items()} == {"broker-a": 4, "broker-b": 4}
    for other in (2, 5, None):
        with pytest.raises(
            LocalBrokerError, match=r"Topic again exists with 4 on broker-a, 4 on broker-b; expected [258]"
        ):
            cluster.create_topic("again", queues=other)
    cluster.create_topic("again", queues=6, broker="broker-b", resize=True)
    assert cluster.admin.queues_of("again", ["broker-b"])["broker-b"].write_queues == 6
    assert cluster.admin.topic_config("again", "broker-b").attributes == {"queue.type": "BatchCQ"}
    cluster.create_topic("again", queues=2, resize=True)
    assert {q.queue_id for q in cluster.admin.route("again").readable_queues()} == {0, 1}
    cluster.admin.create_topic("again", read_queues=4, write_queues=2)
    with pytest.raises(LocalBrokerError, match=r"4 \(2 for writing\) on broker-a"):
        cluster.create_topic("again", queues=4)


def test_killed_and_restarted(cluster: LocalBroker) -> None:
    cluster.create_topic("killed", broker="broker-a")
    send(cluster.name_server, "killed", *BODIES)
    pid, address = cluster.pid("broker-a"), cluster.address("broker-a")
    cluster.kill("broker-a")
    assert cluster.pid("broker-a") is None
    assert not alive(pid or 0)
    awaited(lambda: list(cluster.admin.cluster()) == ["broker-b"])
    cluster.create_topic("meanwhile")
    assert {q.broker_name for q in cluster.admin.route("meanwhile").readable_queues()} == {"broker-b"}
    cluster.restart("broker-a")
    assert cluster.address("broker-a") == address
    assert cluster.pid("broker-a") not in (None, pid)
    assert read(cluster.admin, "killed") == BODIES
    send(cluster.name_server, "killed", b"one more")
    assert read(cluster.admin, "killed")[-1] == b"one more"


def test_restarted_while_running_from_a_thread_that_ends(cluster: LocalBroker) -> None:
    cluster.create_topic("threaded", broker="broker-b")
    send(cluster.name_server, "threaded", *BODIES)
    thread = threading.Thread(target=cluster.restart, args=("broker-b",))
    thread.start()
    thread.join()
    assert read(cluster.admin, "threaded") == BODIES


def test_a_registration_from_before_a_restart_does_not_count(
    cluster: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server may be slow to notice that a broker was killed."""
    seen: list[int | None] = []

    def slow(registration: Registration, spec: BrokerSpec, server: Server) -> bool:
        seen.append(server.pid)
        return len(seen) == 3

    monkeypatch.setattr(Registration, "hides", slow)
    cluster.restart("broker-a")
    assert seen == [None] * 3
    assert cluster.pid("broker-a") is not None


def test_stopped_and_restarted_with_other_lines(cluster: LocalBroker) -> None:
    cluster.create_topic("stopped", broker="broker-b")
    send(cluster.name_server, "stopped", *BODIES)
    cluster.stop("broker-b")
    assert cluster.pid("broker-b") is None
    assert not (cluster.data / "broker-b" / "store" / "abort").exists()
    cluster.restart("broker-b", conf={"maxMessageSize": 4_000_000, "brokerPermission": 6})
    assert cluster.admin.broker_config("broker-b")["maxMessageSize"] == "4000000"
    assert read(cluster.admin, "stopped") == BODIES


def test_a_broker_that_may_only_be_read_stays_so(cluster: LocalBroker) -> None:
    """To register at once, a broker is told the permission that it has."""
    for permission in ("4", "6"):
        cluster.restart("broker-b", conf={"brokerPermission": permission})
        assert cluster.admin.broker_config("broker-b")["brokerPermission"] == permission


def test_a_restart_on_a_port_that_was_taken(cluster: LocalBroker) -> None:
    cluster.kill("broker-a")
    port = int(cluster.address("broker-a").split(":")[1])
    in_use = pytest.raises(LocalBrokerError, match=rf"broker-a cannot listen: port {port} or \d+ or \d+ is in use")
    with socket.create_server((processes.HOST, port)), in_use:
        cluster.restart("broker-a")
    cluster.restart("broker-a")
    assert cluster.pid("broker-a") is not None


def test_a_restarted_name_server_knows_all_brokers(cluster: LocalBroker) -> None:
    cluster.create_topic("remembered")
    before = cluster.name_server
    cluster.restart("namesrv")
    assert cluster.name_server == before
    assert sorted(cluster.admin.cluster()) == cluster.brokers
    assert len(cluster.admin.route("remembered").readable_queues()) == 16


def test_all_down_and_up_again_in_any_order(cluster: LocalBroker) -> None:
    cluster.create_topic("resurrected")
    for name in ("namesrv", *cluster.brokers):
        cluster.kill(name)
    cluster.restart("broker-b")
    cluster.restart("namesrv")
    cluster.restart("broker-a")
    assert len(cluster.admin.route("resurrected").readable_queues()) == 16


def test_add_broker(cluster: LocalBroker) -> None:
    name = cluster.add_broker(conf={"maxMessageSize": 200_000})
    assert name == cluster.brokers[-1] == "broker-c"
    cluster.create_topic("added", broker=name)
    send(cluster.name_server, "added", *BODIES)
    assert read(cluster.admin, "added") == BODIES
    live = cluster.admin.broker_config(name)
    assert (live["maxMessageSize"], live["fileReservedTime"]) == ("200000", "7")


def test_unknown_names_are_told_the_known_ones(cluster: LocalBroker) -> None:
    with pytest.raises(LocalBrokerError, match=r"There is no 'broker-z' here\. Known: broker-a, broker-b"):
        cluster.kill("broker-z")
    with pytest.raises(LocalBrokerError, match="There is no 'proxy' here"):
        _ = cluster.proxy_server


def test_a_data_folder_that_is_in_use(cluster: LocalBroker) -> None:
    with pytest.raises(LocalBrokerError, match="is in use by another LocalBroker"):
        LocalBroker(data=cluster.data).start()


def test_starting_twice(cluster: LocalBroker) -> None:
    with pytest.raises(LocalBrokerError, match="This LocalBroker is running already"):
        cluster.start()


def test_fixed_ports_and_flags() -> None:
    broker = processes.free_port(processes.BROKER_PORT_DISTANCES)
    taken = [broker + distance for distance in processes.BROKER_PORT_DISTANCES]
    ports = {"namesrv": processes.free_port(ports_to_avoid=taken), "broker-a": broker}
    with LocalBroker(ports=ports, queues=3, conf=WITHOUT_TIMERS, heap_mb=160, jvm=["-Dmine=1"]) as mq:
        flags = Path(f"/proc/{mq.pid('broker-a')}/cmdline").read_text().split("\0")
        assert {"-Xmx160m", "-Dmine=1"} <= set(flags)
        assert mq.name_server == f"127.0.0.1:{ports['namesrv']}"
        assert mq.address("broker-a") == f"127.0.0.1:{ports['broker-a']}"
        mq.create_topic("t")
        assert len(mq.admin.route("t").readable_queues()) == 3


def test_data_is_taken_up_again_with_the_same_ports(tmp_path: Path) -> None:
    with LocalBroker(data=tmp_path / "mine", conf=WITHOUT_TIMERS) as mq:
        mq.create_topic("t")
        send(mq.name_server, "t", *BODIES)
        before = (mq.name_server, mq.address("broker-a"))
    with LocalBroker(data=tmp_path / "mine", conf=WITHOUT_TIMERS) as mq:
        assert (mq.name_server, mq.address("broker-a")) == before
        assert read(mq.admin, "t") == BODIES
        mq.kill("broker-a")  # it would take its ten seconds to end, which one block has shown
    with (
        socket.create_server((processes.HOST, int(before[0].split(":")[1]))),
        LocalBroker(data=tmp_path / "mine", conf=WITHOUT_TIMERS) as mq,
    ):
        assert mq.name_server != before[0]
        assert mq.address("broker-a") == before[1]
        assert read(mq.admin, "t") == BODIES
        mq.kill("broker-a")


@pytest.mark.parametrize(("masters", "slaves"), [(0, 0), (1, -1)])
def test_impossible_numbers(masters: int, slaves: int) -> None:
    with pytest.raises(LocalBrokerError, match="LocalBroker cannot have"):
        LocalBroker(masters, slaves)


def test_lines_that_are_not_the_users() -> None:
    with pytest.raises(LocalBrokerError, match="conf must not set listenPort: LocalBroker decides it"):
        LocalBroker(conf={"listenPort": 1})


def test_not_running() -> None:
    mq = LocalBroker()
    assert not mq.running
    for ask in (lambda: mq.name_server, lambda: mq.admin, lambda: mq.create_topic("t"), lambda: mq.kill("broker-a")):
        with pytest.raises(LocalBrokerError, match=r"This LocalBroker is not running\. Use it in a with block"):
            ask()


@pytest.mark.parametrize(
    ("used", "free", "sentence"),
    [
        (91 << 30, 9 << 30, r"is more than 90% full, and a RocketMQ broker refuses messages then\. Free some space"),
        (100 << 20, 100 << 20, r"has less than 128 MiB left\. Free some space"),
    ],
)
def test_a_disk_that_is_too_full(monkeypatch: pytest.MonkeyPatch, used: int, free: int, sentence: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(used + free, used, free))
    with pytest.raises(LocalBrokerError, match=sentence):
        LocalBroker().start()


def test_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalBrokerError, match=r"Could not write to .*/file/data: Not a directory\. Free some space"):
        LocalBroker(data=tmp_path / "file" / "data").start()


def test_a_broker_that_ends_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log has no room either: without the remedy the error is a part of a stack."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100 << 30, 100 << 30, 0))
    error = LocalBrokerError("broker-a ended while starting", remark="a stack")
    with pytest.raises(LocalBrokerError, match="ended while starting"), cluster_room._starting_on(tmp_path):
        raise error
    assert f"a stack. The disk of {tmp_path} is more than 90% full" in str(error)
    assert str(error).endswith("Free some space")
