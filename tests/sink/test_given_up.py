"""A task that Spark has given up stops sending: its next attempt looks what is stored, and sends the rest."""

from __future__ import annotations

import queue as queues
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ClosedError, SendFailed
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.producer.ambiguity import SendOutcomeKind, classify
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion
from rocketmq_spark.producer.retry import RetryPolicy, RetryState
from rocketmq_spark.spark.sink import checks, worker_socket
from rocketmq_spark.spark.sink.exactly_once import ExactlyOnceTask, NotedQueuesSender, plan_job
from rocketmq_spark.spark.sink.report import TaskCounts
from rocketmq_spark.spark.sink.task import TaskWriter
from tests.fix_spark import Finished
from tests.live.writes import Make, frame, sink_options

QUEUE = MessageQueue("t", "a", 0)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    spark, worker = socket.socketpair()
    yield spark, worker
    spark.close()
    worker.close()


def watched(worker: socket.socket) -> Callable[[], bool]:
    """As below PySpark's worker, which has the connection to Spark in a variable of this name."""
    names: dict[str, Any] = {"__name__": "pyspark.worker", "watch": worker_socket.watch_worker_socket}
    exec("def main(infile, outfile):\n    return (lambda: watch())()", names)
    with worker.makefile("rb") as infile:
        return cast(Callable[[], bool], names["main"](infile, None))


def test_outside_of_a_worker_nobody_gives_up() -> None:
    assert worker_socket.watch_worker_socket() is worker_socket.never_abandoned


def test_connection_closed_by_spark_is_seen_behind_unread_bytes(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    spark, worker = sockets
    over = watched(worker)
    spark.sendall(b"rows")
    assert not over()
    spark.close()
    assert over()
    assert worker.recv(4) == b"rows"
    assert over()


class Keeping:
    def __init__(self) -> None:
        self.sent: list[MessageQueue] = []

    def send_async(self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: object) -> None:
        self.sent.append(queue)


def test_nothing_is_sent_when_spark_has_given_up_the_attempt() -> None:
    keeping, outcomes, over = Keeping(), list[Any](), False
    sender = NotedQueuesSender(cast(Any, keeping), [QUEUE], lambda: over)
    request = SendRequest("g", b"x", "")
    sender.send_async(QUEUE, request, Deadline.after(1), outcomes.append)
    assert (keeping.sent, outcomes) == ([QUEUE], [])
    over = True
    sender.send_async(QUEUE, request, Deadline.after(1), outcomes.append)
    assert keeping.sent == [QUEUE]
    (refused,) = outcomes
    assert classify(refused) is SendOutcomeKind.REJECTED
    assert RetryState(RetryPolicy(None, None), False).next_action(QUEUE, refused, (), 60.0) is refused


def test_queues_are_those_that_were_noted_of_the_newest_route() -> None:
    """One that was never noted is no choice, and one that is gone is none any more."""
    found: list[tuple[MessageQueue, ...]] = []
    inner = SimpleNamespace(publish_queues=lambda topic, deadline, refresh: found[-1])
    other, new = MessageQueue("t", "a", 1), MessageQueue("t", "a", 2)
    sender = NotedQueuesSender(cast(Any, inner), [QUEUE, other])
    for route, noted in (((QUEUE, other, new), (QUEUE, other)), ((other, new), (other,)), ((QUEUE,), (QUEUE,))):
        found.append(route)
        assert sender.publish_queues("t", Deadline.after(1)) == noted


def test_tasks_of_one_process_with_other_queues_share_nothing() -> None:
    """Which of them are an environment's is counted in those that were noted."""
    inner = cast(Any, object())
    one, alike, more = (
        NotedQueuesSender(inner, queues) for queues in ([QUEUE], [QUEUE], [QUEUE, MessageQueue("t", "a", 1)])
    )
    assert one == alike != more


def test_outcome_wait_ends_when_spark_abandons_the_task() -> None:
    """A broker that does not answer must not keep a worker that Spark has forgotten."""
    writer, once = TaskWriter.__new__(TaskWriter), ExactlyOnceTask.__new__(ExactlyOnceTask)
    asked: list[bool] = []

    def over() -> bool:
        asked.append(len(asked) > 0)
        return asked[-1]

    once._is_abandoned = over
    writer._exactly_once, writer._options = once, cast(Any, type("Given", (), {"send_timeout": 60.0}))
    writer._outcomes = queues.SimpleQueue()
    with pytest.raises(ClosedError, match="Spark has abandoned this task"):
        writer._next_outcome()
    assert asked == [False, True]


def test_task_error_counts_rows_acknowledged_despite_a_failure() -> None:
    writer = TaskWriter.__new__(TaskWriter)
    outgoing = OutgoingSend("T", SendRequest("g", b"x"), 3.0)
    writer._exactly_once, writer._counts, writer._pending_outcomes, writer._outcomes = (
        None,
        TaskCounts(),
        3,
        queues.SimpleQueue(),
    )
    writer._options = cast(Any, SimpleNamespace(send_timeout=60.0, require_store_ok="any"))
    writer._engine = cast(Any, SimpleNamespace(close=lambda *_, **__: None))
    stored = SendResult(SendStatus.SEND_OK, "", QUEUE, 7)
    for rows, outcome in ((1, SendFailed("the first")), (5, stored), (2, SendFailed("another"))):
        writer._outcomes.put((rows, SendCompletion(outgoing, outcome, 1, ["a"])))
    with pytest.raises(SendFailed, match=r"the first.*Acknowledged before that: 5 rows"):
        writer.write([])


def test_failing_task_gives_up_its_batches_before_it_disconnects() -> None:
    """What breaks would else be sent again, over a new connection, when the next attempt has looked."""
    writer, done = TaskWriter.__new__(TaskWriter), list[str]()
    writer._pending_outcomes, writer._outcomes = 0, queues.SimpleQueue()
    writer._engine = cast(Any, SimpleNamespace(close=lambda *_, **__: done.append("given up")))
    writer._exactly_once = cast(Any, SimpleNamespace(end_sending=lambda: done.append("hung up")))
    with pytest.raises(ZeroDivisionError):
        writer.write(1 // each for each in (0,))  # type: ignore[arg-type, misc]
    assert done == ["given up", "hung up"]


SCRIPT = """
    import os, time

    import pyarrow as pa

    log, daemon = sys.argv[1:]
    spark = new_session("local[1,2]", spark_python_use_daemon=daemon)

    def source(batches):
        from pyspark import TaskContext

        for _ in batches:
            pass
        until = time.monotonic() + 60
        while not TaskContext.get().attemptNumber():
            if os.path.exists(log) or time.monotonic() > until:
                raise ValueError("the input fails")
            time.sleep(0.01)
        yield pa.RecordBatch.from_arrays([pa.array([1])], names=["id"])

    def note(line):
        with open(log, "a") as file:
            print(line, file=file)

    def sink(batches):
        from pyspark import TaskContext

        from rocketmq_spark.spark.sink import checks, worker_socket

        over = worker_socket.watch_worker_socket()
        attempt = TaskContext.get().attemptNumber()
        if not attempt:  # nothing is read: Spark notices that its input failed when it has given us all that came before
            note("sends")
            until = time.monotonic() + 30
            while not over() and time.monotonic() < until:
                time.sleep(0.01)
            note("stops" if over() else "goes on")
            return
        for _ in batches:
            break
        yield pa.RecordBatch.from_arrays([pa.array([int(over())])], names=["id"])

    one = spark.range(0, 1, 1, 1)
    rows = one.mapInArrow(source, "id long").mapInArrow(sink, "id long").collect()
    until = time.monotonic() + 60
    while open(log).read().count("\\n") < 2 and time.monotonic() < until:
        time.sleep(0.1)
    report([[row.id for row in rows], open(log).read().split("\\n")[:-1]])
"""


@pytest.mark.parametrize("daemon", ["true", "false"])
def test_worker_survives_a_failing_task_input_and_notices_it(
    run_script: Callable[..., Finished], tmp_path: object, daemon: str
) -> None:
    """Without the daemon PySpark's worker is the program itself, and its file shows no number."""
    assert run_script(SCRIPT, f"{tmp_path}/log", daemon).report == [[0], ["sends", "stops"]]


def test_an_attempt_that_fails_has_nothing_left_to_send(rocketmq: LocalBroker, make_topic: Make) -> None:
    """Over a slow way it would arrive when the next attempt has looked what is stored."""
    options = sink_options(rocketmq.name_server, topic=make_topic(queues=1), deliveryGuarantee="exactly-once")
    plan, rows = plan_job(options), frame(body=["x"])
    names = checks.check_sink(options, from_arrow_schema(rows.schema))

    def broken() -> Iterator[pa.RecordBatch]:
        yield rows
        raise ZeroDivisionError("the task fails")

    address = session.routes(options).address(rocketmq.brokers[0])
    connection = session.client(options).rpc_client.pool.get(address, Deadline.after(5.0))
    TaskWriter(options, names, 0, {}, ExactlyOnceTask(options, plan)).write(iter([rows]))
    assert not connection.closed
    with pytest.raises(ZeroDivisionError):
        TaskWriter(options, names, 0, {}, ExactlyOnceTask(options, plan)).write(broken())
    assert connection.closed
