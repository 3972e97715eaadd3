"""What a server pushes without end: the memory of the process grows by less than 100 MiB, and other requests are answered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request, SysFlag
from rocketmq_spark.client.instance import RegisteredMember
from rocketmq_spark.model.send import TransactionState
from rocketmq_spark.wire import header
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.compression import compress
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.client.test_replies import passed_on
from tests.harness import forget_process_peak, process_peak_bytes, store
from tests.mockbroker import WAIT_S, MockBroker, eventually

MIB = 1 << 20
MANY = 300
BOMB = compress(bytes(64 * MIB))
PACKED = int(SysFlag.COMPRESSED | SysFlag.ZLIB)


@contextlib.contextmanager
def growing_less_than(limit: int) -> Iterator[None]:
    """Check that the memory of the process grows by less than ``limit`` bytes inside the block."""
    forget_process_peak()
    before = process_peak_bytes()
    yield
    assert process_peak_bytes() - before < limit


def flood(broker: MockBroker, command: Command) -> None:
    """Push the same frame many times."""
    frame = broker.encode(command)
    (peer,) = broker.peers
    for _ in range(MANY):
        peer.send(frame)


@pytest.mark.parametrize(
    "command",
    [
        passed_on(BOMB + bytes(MIB), "CORRELATION_ID\x01no\x02", sysFlag=PACKED),
        Command(Request.CHECK_TRANSACTION_STATE, {"tranStateTableOffset": "1", "commitLogOffset": "2"},
                store("t", bytes(MIB), "PGROUP\x01pg\x02")),
        Command(Request.CHECK_TRANSACTION_STATE, {"tranStateTableOffset": "1", "commitLogOffset": "2"},
                store("t", BOMB + bytes(MIB), "PGROUP\x01pg\x02", sys_flag=PACKED)),
        Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "cg"}, bytes(MIB)),
        Command(Request.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "cg"}, bytes(MIB)),
        Command(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "cg", **{f"{i}": "" for i in range(50_000)}}),
        Command(9999, {}, bytes(30 * MIB)),
    ],
    ids=["replies", "checks", "bombs", "questions", "messages", "fields", "large"],
)  # fmt: skip
def test_a_flood_of_requests_takes_little_memory(broker: MockBroker, parts: Parts, command: Command) -> None:
    session.close_all()
    may_work = threading.Event()

    def hangs(address: str, asked: Command) -> Command | None:
        assert may_work.wait(WAIT_S)
        return None

    parts.instance.join(RegisteredMember("cg", request_handler=hangs, membership=lambda: GroupMembership("cg", {})))
    leave = parts.sender.join("pg", 0.0, lambda message, place: lambda: wait(may_work))
    parts.replies.expect("yes", lambda reply: None)
    parts.routes.get("t")
    with growing_less_than(100 * MIB):
        flood(broker, command)
        assert parts.routes.get("t", 0.0), "a request behind them is answered"
        may_work.set()
        eventually(lambda: parts.pool.connect_options.waiting_budget.used_bytes == 0)
    leave(parts.soon)


def wait(event: threading.Event) -> TransactionState:
    assert event.wait(WAIT_S)
    return TransactionState.UNKNOWN


def test_a_frame_counts_once_it_is_known_to_be_a_request(broker: MockBroker, parts: Parts) -> None:
    """A server that announces much and sends little takes no memory either."""
    parts.routes.get("t")
    frame = header.encode(Command(9999, {}, bytes(200 * MIB)), max_frame=None)[: 20 * MIB]
    (peer,) = broker.peers
    with growing_less_than(50 * MIB):
        peer.send(frame)
        peer.close()
        eventually(lambda: not parts.pool.is_connected(broker.address))
