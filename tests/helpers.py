"""What tests wait for: an answer, or what a topic holds on a real broker. A wait whose time is up fails, with what there was.

That nothing comes is for the test to say (``counts`` with 0), after something that proves that it would be there by now.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base import threads
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import PullSysFlag, Response
from rocketmq_spark.client.rpc import error_from_response as refusal
from rocketmq_spark.errors import BrokerBusy, CallTimeout, ConnectionLost, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, ReceivedMessage, SendRequest
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.messages import decode_messages

T = TypeVar("T")
WAIT_S = 180.0
# What code of users raises: each is its failure, and ends no thread of ours.
RAISED = (ZeroDivisionError("mine"), SystemExit("mine"), KeyboardInterrupt("mine"), GeneratorExit("mine"))
_LOOK_S, _LONGEST_PAUSE_S = 0.02, 0.25


def between_looks(began: float, least_s: float) -> None:
    """Wait before the next look, longer where the last one took long: who waits must not keep busy what it waits for.

    Args:
        began: When the last look began, by ``time.perf_counter``.
        least_s: Seconds to wait at least.
    """
    threading.Event().wait(max(least_s, min(3 * (time.perf_counter() - began), _LONGEST_PAUSE_S)))


def awaited(ask: Callable[[], T], enough: Callable[[T], object] = bool, seconds: float = WAIT_S) -> T:
    """The first good answer: what a broker says may lag behind what it acknowledged."""
    deadline = Deadline.after(seconds)
    while True:
        began = time.perf_counter()
        if enough(answer := ask()):
            return answer
        if deadline.expired:
            pytest.fail(f"it did not happen within {seconds:g} s; there was {_short(answer)}")
        between_looks(began, _LOOK_S)


@contextlib.contextmanager
def told(text: str, level: int = logging.WARNING) -> Iterator[threading.Event]:
    """An event that is set once the package logs something with this text."""
    package, event = logging.getLogger("rocketmq_spark"), threading.Event()
    handler = logging.Handler(level)
    handler.emit = lambda record: event.set() if text in record.getMessage() else None  # type: ignore[method-assign]
    before = package.level
    if package.getEffectiveLevel() > level:  # else nobody would hear of it
        package.setLevel(level)
    package.addHandler(handler)
    try:
        yield event
    finally:
        package.removeHandler(handler)
        package.setLevel(before)


def frames_of_threads() -> dict[int, FrameType]:
    """``sys._current_frames``; with a collection of garbage inside, Python 3.11 may stop for ever (python/cpython#106883)."""
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def waits_in(thread: threading.Thread, function: Callable[..., Any]) -> None:
    """Until a thread that was started is in ``function``, or in what that calls; one that has ended came through."""

    def there() -> bool:
        frame = frames_of_threads().get(thread.ident or 0)
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    awaited(lambda: there() or not thread.is_alive())
    assert thread.is_alive(), f"it did not wait in {function.__qualname__}"


def raising(error: BaseException) -> Callable[..., Any]:
    """Code of a user that raises ``error``, whatever it is given."""

    def code(*given: object, **named: object) -> Any:
        raise error

    return code


def unlike_ctrl_c(frame: FrameType) -> bool:
    """Whether what a tracer raises at this line has another effect than Ctrl-C: where newer Pythons stop and older ones do not.

    At a jump back (since 3.12, whose comprehensions jump in the function that they stand in) it leaves the frame without its
    ``except``, ``finally`` and ``__exit__``, where a signal's goes through them. A generator that is closed in a ``yield
    from`` (since 3.13) is not interrupted there. What is raised while garbage is collected goes nowhere: the collector, which may
    begin anywhere, only prints it.
    """
    return frame.f_code is threads._on_collection.__code__ or frame.f_lasti in _untrue_stops(frame.f_code)


@functools.cache
def _untrue_stops(code: CodeType) -> frozenset[int]:
    if sys.version_info < (3, 12):
        return frozenset()
    every = list(dis.get_instructions(code))
    jumps = [one for one in every if one.opname == "JUMP_BACKWARD"]
    places = {one.argval for one in jumps} if sys.version_info < (3, 13) else {one.offset for one in jumps}
    return frozenset(places | {one.offset for one in every if one.opname == "CLEANUP_THROW"})


def no_more_threads(monkeypatch: pytest.MonkeyPatch, name: str = "") -> None:
    """As if the system gave no more threads, of those whose name begins so."""
    start = threading.Thread.start

    def error_from_response(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", error_from_response)


def indexed(mq: LocalBroker | str, seconds: float = WAIT_S) -> None:
    """Until all that living brokers acknowledged is in its queues, which is a moment later: messages get there in the order
    of the log, so one that is sent now comes last. Who refuses it, or stands still, is left alone; who is slow is not.

    ``mq`` is a cluster, or a name server, of which it is not known who is alive.
    """
    address = mq if isinstance(mq, str) else mq.name_server
    client = session.client(options_table.parse({"nameServer": address, "numRetries": 0}).for_role("sink"))
    alive = client.routes.cluster() if isinstance(mq, str) else [name for name in mq.brokers if _runs(mq.pid(name))]
    later: tuple[type[RocketMQError], ...] = (BrokerBusy, CallTimeout)
    if isinstance(mq, LocalBroker):  # its brokers can be reached, if their addresses can be had
        later = (*later, ConnectionLost) if _runs(mq.pid("namesrv")) else ()
    for name in alive:
        queue = MessageQueue(name, name, 0)  # each broker has a topic of its name
        offset = _sent_last(client, queue, later, Deadline.after(seconds))
        if offset is not None:
            _reached(client, queue, offset, seconds)


def freeze(pid: int) -> None:
    """SIGSTOP, until all threads stand still: on a busy machine some still answer for a while."""
    os.kill(pid, signal.SIGSTOP)
    stats = Path(f"/proc/{pid}/task")
    if stats.exists():
        awaited(lambda: {_state(each) for each in stats.glob("*/stat")}, lambda found: found <= {"T", "Z", "X"})


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(") ")[2][0]
    except OSError:  # it has ended, or this system has no such files
        return "X"


def _runs(pid: int | None) -> bool:
    """Whether a server has a process, which was not stopped by a signal."""
    return pid is not None and _state(Path(f"/proc/{pid}/stat")) != "T"


def _sent_last(
    client: session.Client, queue: MessageQueue, later: tuple[type[RocketMQError], ...], deadline: Deadline
) -> int | None:
    """The offset of a message that is sent now; None where it is refused. What these errors say passes, or fails the test."""
    pause = threading.Event()
    while True:
        try:
            sent = client.sender.send(queue, SendRequest("indexed", b"behind all others"), Deadline.after(5.0))
            return sent.queue_offset or 0
        except later:
            if deadline.expired:
                raise
        except RocketMQError:
            return None
        pause.wait(_LOOK_S)


def _reached(client: session.Client, queue: MessageQueue, offset: int, seconds: float) -> None:
    def end() -> int:
        return client.offset_reader.bounds([queue], Deadline.after(20.0))[queue].max_offset

    awaited(end, lambda end: end > offset, seconds)


def counts(mq: LocalBroker, topic: str, at_least: int, seconds: float = WAIT_S) -> dict[int, int]:
    """Messages by queue id, those of all brokers together, once the index shows ``at_least`` of them; no empty queues."""

    indexed(mq)

    def ask() -> dict[int, int]:
        found: dict[int, int] = {}
        for queue, bounds in sorted(mq.admin.describe_topic(topic).items()):
            if bounds.max_offset:
                found[queue.queue_id] = found.get(queue.queue_id, 0) + bounds.max_offset
        return found

    return awaited(ask, lambda found: sum(found.values()) >= at_least, seconds)


def total(mq: LocalBroker, topic: str, at_least: int = 0, seconds: float = WAIT_S) -> int:
    """How many messages a topic has, once there are ``at_least`` so many."""
    return sum(counts(mq, topic, at_least, seconds).values())


def stored(mq: LocalBroker, topic: str, count: int, seconds: float = WAIT_S) -> list[ReceivedMessage]:
    """The messages of a topic by queue and offset, once ``count`` of them, at least one, can be read."""
    assert count > 0, "stored_now says what there is now"
    total(mq, topic, count, seconds)
    return awaited(lambda: stored_now(mq, topic), lambda found: len(found) >= count, seconds)


def stored_now(mq: LocalBroker, topic: str) -> list[ReceivedMessage]:
    """What can be read of a topic now, which may be less than was acknowledged."""
    client = session.client(options_table.parse({"nameServer": mq.name_server}).for_role("sink"))
    found: list[ReceivedMessage] = []
    for queue, bounds in sorted(mq.admin.describe_topic(topic).items()):
        found += (message for message in _of_queue(client, queue, bounds.max_offset) if not _torn(message))
    return found


def _torn(message: ReceivedMessage) -> bool:
    """Whether a broker was killed while it copied the message into its log, and keeps it: its checksum covers the body alone.

    Nobody was told that it is stored, and the rest of its properties is zeros.
    """
    return any("\0" in name + value for name, value in message.properties.items())


def killed(mq: LocalBroker, name: str) -> None:
    """SIGKILL for a server that runs until then, and does not any more."""
    assert mq.pid(name) is not None, f"{name} was dead before"
    mq.kill(name)
    assert mq.pid(name) is None


def _of_queue(client: session.Client, queue: MessageQueue, end: int) -> list[ReceivedMessage]:
    address = client.routes.get(queue.topic, 0.0).brokers[queue.broker_name].master
    assert address is not None
    found: list[ReceivedMessage] = []
    while len(found) < end:
        pull = rpc.PULL_MESSAGE.request(
            consumerGroup="g_reading", topic=queue.topic, queueId=queue.queue_id, queueOffset=len(found),
            maxMsgNums=1024, sysFlag=int(PullSysFlag.SUBSCRIPTION), commitOffset=0, suspendTimeoutMillis=0,
            subscription="*", subVersion=0, expressionType="TAG", bname=queue.broker_name,
        )  # fmt: skip
        answer = client.rpc_client.invoke(address, pull, Deadline.after(10))
        if answer.code in (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED):
            break
        if answer.code != Response.SUCCESS:
            raise refusal(answer, address, queue.topic, str(queue))
        found += decode_messages(answer.body, queue.broker_name)
    return found


def _short(answer: object) -> str:
    many = f"{len(answer)} of " if isinstance(answer, list) else ""
    return many + repr(answer)[:1000]


def progress_json(*ends: str | None) -> str:
    """Return Spark's JSON of a progress with the ends of its sources; an end that is the text of an object becomes the object."""
    return json.dumps({"sources": [{"endOffset": json.loads(end) if end and end[0] == "{" else end} for end in ends]})
