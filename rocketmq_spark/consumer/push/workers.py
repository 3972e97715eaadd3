"""Threads that call listeners, and failed messages on their way to the retry topic.

``Workers`` is a pool of a fixed number of threads with an unbounded queue, as Java's: adding work never blocks. The limits
on cached messages hold back a consumer whose listener is slow.

Waking a thread costs more than a quick listener takes, and threads that are awake compete for the interpreter. So one thread
at a time is woken: by new work, and by a thread that begins work while more is waiting. Few threads handle quick work; where
listeners block, each thread wakes the next until all are awake.

``SendBack`` returns a failed message to the broker. If that fails it sends a copy to the retry topic, or tries again later. It
mirrors ``DefaultMQPushConsumerImpl.sendMessageBack`` and, for ordered messages, ``ConsumeMessageOrderlyService.sendMessageBack``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.base.threads import start_thread
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Workers:
    """``count`` threads, started with the first work. Exceptions of work are logged."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._line: deque[Work] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._waking = False  # a wake is under way: the worker that gets it looks at the line after this is False again
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._mine = threading.local()  # known on a thread from its first moment on, before it is among ``_threads``
        self._lacking = False
        self._closed = False

    def submit(self, *work: Work) -> None:
        """Queue work. Must not be called after ``close``."""
        if self._closed:
            return
        self._line.extend(work)
        if len(self._threads) < self._count:
            self.start_missing()
        self._wake()

    def start_missing(self) -> None:
        """Start missing threads if work is waiting.

        If the system has no threads left, the running ones do the work, or it waits for the next call of this.
        """
        if not self._line:
            return
        with self._lock:
            try:
                while len(self._threads) < self._count and not self._closed:
                    self._threads.append(start_thread(f"{self._name}-{len(self._threads)}", self._run))
            except RuntimeError as e:
                if not self._lacking:
                    text = "%d of %d threads of %s run, and no more can be started: %s"
                    logger.warning(text, len(self._threads), self._count, self._name, e)
                self._lacking = True

    def close(self, deadline: Deadline) -> bool:
        """Drop queued work; returns whether running work ended by ``deadline``."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._wakes.put(None)
        me = threading.current_thread()
        for thread in threads:
            if thread is not me:
                thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in threads if thread is not me)

    @property
    def here(self) -> bool:
        """Whether the calling thread is a worker."""
        return getattr(self._mine, "runs", False)

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            self._wakes.put(None)

    def _run(self) -> None:
        self._mine.runs = True
        while not self._closed:
            try:
                work = self._line.popleft()
            except IndexError:
                self._wakes.get()
                self._waking = False
                continue
            if self._line and not self._waking:
                self._wake()
            work()
            del work  # otherwise the waiting thread would keep the messages alive


TIMEOUT_S = 5.0
COPY_TIMEOUT_S = 3.0
HANGS_S = 10.0  # if no message of a call is accepted for this time, the rest of the call is not sent now
DEAD = -1  # the delay level that makes a message a dead letter
DROPPED = "dropped: the group is broadcasting"  # instead of being sent back


class SendBack:
    """Returns failed messages of one group. After ``max_reconsume_times`` deliveries a message goes to the dead-letter topic."""

    def __init__(self, port: GroupMember, group: str, max_reconsume_times: int, held: MemberState) -> None:
        self._port = port
        self._group = group
        self._max = max_reconsume_times
        self._held = held

    def __call__(self, message: ReceivedMessage, level: int) -> bool:
        """Return a message; returns whether a broker accepted it. A copy loses the delay level, as in Java.

        Brokers do not count attempts after which they could not be reached, so the last one requests a dead letter.
        """
        if message.reconsume_times >= self._max:
            level = DEAD
        taken = self._sent_back(message, level) or self._copied(message, level)
        return self._noted(message, taken, level < 0)

    def dead(self, message: ReceivedMessage) -> bool:
        """Make a message a dead letter after its last attempt in place; returns whether a broker accepted it.

        A copy has the number of attempts. The broker does not count attempts in place, so request 36 would deliver the message
        again: it is used, with the level for dead letters, only for messages that cannot be copied.
        """
        return self._noted(message, self._copied(message, 0) or self._sent_back(message, DEAD), True)

    def _noted(self, message: ReceivedMessage, taken: bool, dead: bool) -> bool:
        if not taken:
            return False
        if dead:
            text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
            attempt = message.reconsume_times + 1
            logger.warning(text, message.msg_id, message.queue, dlq_topic(self._group), attempt)
        with self._held.lock:
            self._held.counts["sent back"] += 1
        return True

    def _sent_back(self, message: ReceivedMessage, level: int) -> bool:
        if message.sys_flag & SysFlag.INNER_BATCH:
            return False  # a broker could take back the whole batch or nothing, and refuses
        try:
            self._port.send_back(self._group, message, level, self._max, Deadline.after(TIMEOUT_S))
        except RocketMQError as e:
            logger.warning("message %s could not be sent back by its broker: %s", message.msg_id, e)
            return False
        return True

    def _copied(self, message: ReceivedMessage, level: int) -> bool:
        """Send a copy. After the last attempt it goes to the dead-letter topic."""
        max_times = self._max if level >= 0 else 0
        try:
            self._port.send_to_retry(self._group, message, max_times, Deadline.after(COPY_TIMEOUT_S))
        except RocketMQError as e:
            logger.warning("message %s could not be copied to the retry topic: %s", message.msg_id, e)
            return False
        return True


def send_each(
    messages: Iterable[ReceivedMessage], send: Callable[[ReceivedMessage], bool], is_over: Callable[[], bool]
) -> list[ReceivedMessage]:
    """Send messages of a call back one after the other. Returns the messages that no broker accepted.

    Sends no more messages after ``is_over`` returned True (another call finished them, or another member has the queue), or if
    the broker hangs: a call may have a thousand rows, and each would wait for the broker.
    """
    left = []
    hangs = Deadline.after(HANGS_S)
    for message in messages:
        if hangs.expired or is_over() or not send(message):
            left.append(message)
        else:
            hangs = Deadline.after(HANGS_S)
    return left
