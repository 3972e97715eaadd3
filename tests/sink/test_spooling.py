"""The sink's spool: rows that are kept by their worker count as spooled, and the next task or a command sends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import MessageIllegal, RocketMQError, SpoolError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.producer.routing import queues_of_environment
from rocketmq_spark.producer.send_queue import INITIAL_REQUESTS_PER_BROKER
from rocketmq_spark.session.spools import open_send_spool, open_store, spools_in, worker_spool
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.report import Written
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.spool.spool import SendSpool, SpoolReading, record_of, send_of
from rocketmq_spark.wire.envelope import INNER_TOPIC
from rocketmq_spark.wire.messages import decode_batch
from tests.helpers import stored
from tests.live.writes import Writes, bodies, frame, numbered, writes
from tests.mockbroker import Call, Command, MockBroker, eventually, ok, refuse, route

__all__ = ["writes"]

BUSY = refuse(Response.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
# A master that is back before its slave.
ALONE = refuse(Response.SYSTEM_ERROR, "in-sync replicas not enough")


class Moody(MockBroker):
    """Its own name server; keeps what it takes. ``mood`` answers batches when it is not None."""

    def __init__(self) -> None:
        super().__init__()
        self.mood: Command | Callable[[Call], Command | None] | None = BUSY
        self.kept: list[bytes] = []
        self.on(Request.SEND_BATCH_MESSAGE, self._send)

    def __enter__(self) -> Moody:
        super().__enter__()
        self.on(Request.GET_ROUTEINFO_BY_TOPIC, route(4, {"broker-a": self.address}))
        return self

    def _send(self, call: Call) -> Command | None:
        if self.mood is not None:
            return self.mood(call) if callable(self.mood) else self.mood
        at = len(self.kept)
        self.kept += [bytes(item.body) for item in decode_batch(call.command.body)]
        return ok(msgId="x", queueId=call.ext("e"), queueOffset=at)


@pytest.fixture
def moody() -> Iterator[Moody]:
    with Moody() as broker:
        yield broker


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A spool lives as long as its process; the next test begins with none."""
    yield
    session.close_all()


def reasons(path: Path) -> str:
    reading = SpoolReading(path)
    try:
        return " ".join(entry.state.reason for entry in reading.entries() if entry.state is not None)
    finally:
        reading.close()


def test_rows_for_busy_brokers_are_spooled_then_sent_by_worker(
    moody: Moody, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = Writes(moody.address, monkeypatch)
    done = write(
        frame(body=numbered(300)), topic="t", batchMaxBytes=1_000, sendTimeout="600ms",
        onSendFailure="spool", spoolDir=str(tmp_path), spoolSync="batch",
    )  # fmt: skip
    assert (done.rows, done.spooled, done.batches) == (0, 300, 0)
    assert str(done).endswith("and 300 rows spooled")
    moody.mood = ALONE
    (path,) = spools_in(tmp_path)
    eventually(lambda: "in-sync" in reasons(path), 60)
    moody.mood = None
    eventually(lambda: len(moody.kept) >= 300, 60)
    assert Counter(moody.kept) == Counter(body.encode() for body in numbered(300))


@pytest.mark.parametrize("alive", [True, False])
def test_workers_do_not_send_what_another_environment_spooled(
    moody: Moody, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: bool
) -> None:
    given = {"topic": "t", "sendTimeout": "300ms", "onSendFailure": "spool", "spoolDir": str(tmp_path)}
    write = Writes(moody.address, monkeypatch)
    assert write(frame(body=numbered(3)), **given, environment="1", environments="2").spooled == 3
    (first,) = spools_in(tmp_path)
    if not alive:
        session.close_all()  # its process is gone, and its folder is free
    assert write(frame(body=numbered(2)), **given, environment="2", environments="2").spooled == 2
    assert len(spools_in(tmp_path)) == 2
    session.close_all()
    reading = SpoolReading(first)
    assert reading.totals.depth > 0
    reading.close()


@pytest.mark.parametrize("routed", [True, False])
def test_rows_that_wait_for_long_are_kept_while_nobody_answers(
    moody: Moody, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, routed: bool
) -> None:
    write = Writes(moody.address, monkeypatch)
    for question in (Request.QUERY_TOPIC_CONSUME_BY_WHO, Request.SEND_MESSAGE_V2):
        moody.on(question, BUSY)
    if not routed:
        moody.on(Request.GET_ROUTEINFO_BY_TOPIC, BUSY)
    done = write(
        frame(body=["now", "far"], delayMs=[None, 864_000_000]), topic="t", longDelay="dmq", sendTimeout="500ms",
        onSendFailure="spool", spoolDir=str(tmp_path),
    )  # fmt: skip
    assert (done.rows, done.spooled) == (0, 2)
    session.close_all()
    reading = SpoolReading(*spools_in(tmp_path))
    assert {send_of(entry.record).topic for entry in reading.entries()} == {"t", INNER_TOPIC}
    reading.close()


def test_counts_add_up_over_tasks() -> None:
    assert (Written(rows=1, spooled=2) + Written(rows=3, spooled=4)).spooled == 6


def test_keyed_rows_keep_their_order_through_the_spool(
    moody: Moody, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = Writes(moody.address, monkeypatch)
    given = {
        "topic": "t", "queueSelector": "hash", "batchMaxBytes": 400, "sendTimeout": "500ms",
        "onSendFailure": "spool", "spoolDir": str(tmp_path), "spoolSync": "never",
    }  # fmt: skip
    done = write(frame(body=numbered(100), shardingKey=["k"] * 100), **given)
    assert done.spooled == 100
    moody.mood = None
    done = write(frame(body=numbered(100, 100), shardingKey=["k"] * 100), **given)
    assert done.rows + done.spooled == 100
    eventually(lambda: len(moody.kept) >= 200, 60)
    assert moody.kept == [body.encode() for body in numbered(200)]


def test_permanent_failure_fails_the_task_and_spools_nothing(
    moody: Moody, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor of the batches that have no answer when one is refused: Spark repeats all of them."""
    no = refuse(Response.MESSAGE_ILLEGAL, "no")
    moody.mood = lambda call: no if len(moody.seen(Request.SEND_BATCH_MESSAGE)) == INITIAL_REQUESTS_PER_BROKER else None
    with pytest.raises(MessageIllegal):
        Writes(moody.address, monkeypatch)(
            frame(body=numbered(300)), topic="t", batchMaxBytes=1_000, sendTimeout="2s",
            onSendFailure="spool", spoolDir=str(tmp_path),
        )  # fmt: skip
    (path,) = spools_in(tmp_path)
    assert SpoolReading(path).totals.depth == 0


def test_task_fails_as_without_a_spool_beyond_spool_max_bytes(
    moody: Moody, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RocketMQError) as caught:
        Writes(moody.address, monkeypatch)(
            frame(body=numbered(300)), topic="t", batchMaxBytes=1_000, sendTimeout="500ms",
            onSendFailure="spool", spoolDir=str(tmp_path), spoolMaxBytes="2k",
        )  # fmt: skip
    assert "The spool could not keep it: " in str(caught.value)
    assert "option 'spoolMaxBytes'" in str(caught.value)


def test_rows_spooled_without_a_master_are_sent_by_a_later_task(
    rocketmq: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"topic": topic, "sendTimeout": "500ms", "onSendFailure": "spool", "spoolDir": str(tmp_path)}
    done = Writes("127.0.0.1:1", monkeypatch)(frame(body=["kept"]), **given)
    assert (done.rows, done.spooled) == (0, 1)
    session.close_all()  # as if the worker had died
    # One address in common: it is the same cluster.
    back = Writes(f"127.0.0.1:1;{rocketmq.name_server}", monkeypatch)
    done = back(frame(body=["sent"]), **{**given, "sendTimeout": "20s"})
    assert (done.rows, done.spooled) == (1, 0)
    assert sorted(bodies(stored(rocketmq, topic, 2))) == ["kept", "sent"]


def test_rows_spooled_for_one_cluster_are_not_sent_to_another(
    rocketmq: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"topic": topic, "sendTimeout": "500ms", "onSendFailure": "spool", "spoolDir": str(tmp_path)}
    assert Writes("127.0.0.1:1", monkeypatch)(frame(body=["kept"]), **given).spooled == 1
    session.close_all()
    done = Writes(rocketmq.name_server, monkeypatch)(frame(body=["sent"]), **{**given, "sendTimeout": "20s"})
    assert (done.rows, done.spooled) == (1, 0)
    assert bodies(stored(rocketmq, topic, 1)) == ["sent"]
    session.close_all()
    (left,) = [path for path in spools_in(tmp_path) if (reading := SpoolReading(path)).totals and reading.totals.depth]
    assert str(SpoolReading(left).owner) == "the cluster of 127.0.0.1:1"


def test_queries_with_other_send_options_have_separate_spools(tmp_path: Path) -> None:
    """The first one's ``requireStoreOk`` decided for all of them, or its user."""
    given = {"nameServer": "127.0.0.1:1", "topic": "T", "onSendFailure": "spool", "spoolDir": str(tmp_path)}
    found = []
    for more in ({}, {"requireStoreOk": "ok"}, {"accessKey": "me", "secretKey": "hush"}, {}):
        parsed = options.parse({**given, **more}).for_role("sink")
        spool = worker_spool(parsed, checks.producer_settings(parsed))
        assert isinstance(spool, SendSpool)
        found.append(spool)
    assert found[0] is found[3]
    assert len({spool.path for spool in found}) == 3


def test_idle_worker_sends_what_another_worker_left_spooled(moody: Moody, tmp_path: Path) -> None:
    moody.on(Request.SEND_MESSAGE_V2, ok(msgId="x", queueId="0", queueOffset=1))
    given = {"nameServer": moody.address, "topic": "t", "onSendFailure": "spool", "spoolDir": str(tmp_path)}
    parsed = options.parse(given).for_role("sink")
    mine = worker_spool(parsed, checks.producer_settings(parsed))
    assert isinstance(mine, SendSpool)
    left = open_store(tmp_path / "worker-1", parsed)
    send = SpooledSend("t", SendRequest("g", b"left", "UNIQ_KEY\x01ID\x02"), None, ("ID",))
    left.add([(record_of(send, mine.now_ms()), mine.now_ms())])
    left.close()
    assert worker_spool(parsed, checks.producer_settings(parsed)) is mine
    eventually(lambda: len(mine.store) == 0, 60)
    assert len(moody.seen(Request.SEND_MESSAGE_V2)) == 1


def test_spooled_rows_keep_the_environment_queues_they_were_for(
    tmp_path: Path,
) -> None:
    """The folder of a dead worker says which it had; a broker may have been away when the driver counted those of its topic."""
    given = {"nameServer": "127.0.0.1:1", "environment": "1", "onSendFailure": "spool", "spoolDir": str(tmp_path)}
    of_t, of_u = (options.parse({**given, "topic": topic}).for_role("sink") for topic in "tu")
    settings, sender = checks.producer_settings(of_u), session.sender(of_u)
    assert settings.environment is not None
    a, b = ({topic: (MessageQueue(topic, name, 0),) for topic in "tu"} for name in "ab")
    known = queues_of_environment(sender, settings.environment)
    known["u"] = a["u"]
    left = open_send_spool(open_store(tmp_path / "worker-1", of_u), sender, settings)
    left.keep([SpooledSend("u", SendRequest("g", b"x"), None, ("id",))])
    left.finish()
    known.clear()
    TaskWriter(of_t, {"body": "body"}, 0, {"t": b["t"]}).write([])
    with pytest.raises(SpoolError, match=r"the driver counted u/b/0 as the queues of .*but a spool of this .*u/a/0"):
        TaskWriter(of_u, {"body": "body"}, 0, {"u": b["u"]})
    assert known == {"t": b["t"], "u": a["u"]}
    TaskWriter(of_u, {"body": "body"}, 0, {"u": a["u"]}).write([])
    session.close_all()
