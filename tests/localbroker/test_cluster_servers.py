"""What servers of a cluster are to each other: name servers, slaves of masters, a proxy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.errors import RouteNotFound
from rocketmq_spark.localbroker import LocalBroker, processes
from tests.fix_clusters import WITHOUT_TIMERS
from tests.helpers import awaited
from tests.localbroker.messages import read, send

BODIES = [b"message %d" % i for i in range(100)]


def test_two_name_servers() -> None:
    """Each knows all brokers, one may be away, and one that comes back is told everything."""
    with LocalBroker(brokers=2, name_servers=2, conf=WITHOUT_TIMERS, quiet=True) as mq:
        addresses = mq.name_server.split(";")
        assert addresses == [mq.address("namesrv"), mq.address("namesrv-2")]
        mq.create_topic("t", queues=2)
        mq.kill("namesrv")
        send(mq.name_server, "t", b"by the second")
        mq.kill("broker-a")
        mq.restart("broker-a")
        mq.restart("namesrv")
        mq.kill("namesrv-2")
        assert read(mq.admin, "t") == [b"by the second"]
        assert set(mq.admin.cluster()) == {"broker-a", "broker-b"}
        assert len(mq.admin.route("t").readable_queues()) == 4


def test_slaves() -> None:
    with LocalBroker(slaves=1, conf=WITHOUT_TIMERS) as mq:
        assert (mq.brokers, mq.slaves) == (["broker-a"], ["broker-a-slave-1"])
        assert mq.admin.cluster()["broker-a"].addresses == {
            0: mq.address("broker-a"),
            1: mq.address("broker-a-slave-1"),
        }
        mq.create_topic("t")
        send(mq.name_server, "t", *BODIES)
        slave = mq.address("broker-a-slave-1")
        awaited(lambda: read(mq.admin, "t", slave) == BODIES)
        mq.kill("broker-a")

        awaited(lambda: list(mq.admin.cluster()["broker-a"].addresses) == [1])
        assert read(mq.admin, "t", slave) == BODIES
        mq.restart("broker-a-slave-1")
        mq.restart("broker-a")
        assert read(mq.admin, "t", mq.address("broker-a")) == BODIES


def test_proxy() -> None:
    with LocalBroker(proxy=True, conf=WITHOUT_TIMERS, heap_mb=160) as mq:
        assert "-Xmx160m" in Path(f"/proc/{mq.pid('proxy')}/cmdline").read_text().split("\0")
        mq.create_topic("t")
        with BaseAdmin(mq.proxy_server) as through:
            assert through.route("t").brokers["broker-a"].master == mq.proxy_server
            send(mq.proxy_server, "t", *BODIES)
            assert read(through, "t") == BODIES
            with pytest.raises(RouteNotFound):
                through.route("unknown")
        assert processes.is_listening(int(mq.proxy_grpc.split(":")[1]))
        mq.restart("proxy", {"maxDelayTimeMills": 5000})
        assert json.loads((mq.data / "proxy" / "rmq-proxy.json").read_text())["maxDelayTimeMills"] == 5000
        with BaseAdmin(mq.proxy_server) as through:
            assert read(through, "t") == BODIES
