"""A name server and brokers that say what a test wants: routes with masters and slaves, bounds of queues."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.header import Command
from tests.mockbroker import MockBroker, ok


def route(brokers: Mapping[str, Mapping[int, str]], queues: int = 1, perm: int = 6, acting: bool = False) -> Command:
    """Each broker's addresses by id; with ``acting`` slaves may act for masters."""
    return ok(
        json.dumps(
            {
                "brokerDatas": [
                    {
                        "brokerName": name,
                        "cluster": "c",
                        "enableActingMaster": acting,
                        "brokerAddrs": {str(i): a for i, a in addresses.items()},
                    }
                    for name, addresses in brokers.items()
                ],
                "queueDatas": [
                    {"brokerName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": perm}
                    for name in brokers
                ],
            }
        ).encode()
    )


def cluster(brokers: Mapping[str, MockBroker], number: int = 0) -> Command:
    """The list of all brokers, each with this id."""
    table = {
        name: {"brokerName": name, "cluster": "c", "brokerAddrs": {str(number): broker.address}}
        for name, broker in brokers.items()
    }
    return ok(json.dumps({"brokerAddrTable": table, "clusterAddrTable": {"c": list(brokers)}}).encode())


def stats(
    bounds: Mapping[MessageQueue, tuple[int, int]], newest_ms: int = 7, newest: Mapping[MessageQueue, int] | None = None
) -> Command:
    """Minimum and maximum of queues, as a broker tells them, and when their last message was stored."""
    rows = ",".join(
        f'{{"brokerName":"{queue.broker_name}","queueId":{queue.queue_id},"topic":"{queue.topic}"}}:'
        f'{{"lastUpdateTimestamp":{(newest or {}).get(queue, newest_ms)},"maxOffset":{high},"minOffset":{low}}}'
        for queue, (low, high) in bounds.items()
    )
    return ok(b'{"offsetTable":{%s}}' % rows.encode())
