"""The stream by which a Proxy knows a consumer: settings go there, its answers come back, and it is made anew when it breaks.

One for each endpoint, each with a thread of its own, since every Proxy keeps the settings of its clients by itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rocketmq_spark.clock import Deadline, backoff
from rocketmq_spark.errors import ConnectionLost, RocketMQError
from rocketmq_spark.failures import Failure, attempt, start_thread
from rocketmq_spark.grpc_proxy.answers import refused
from rocketmq_spark.grpc_proxy.channel import ProxyChannel
from rocketmq_spark.grpc_proxy.facts import TELEMETRY, Code
from rocketmq_spark.grpc_proxy.protos import proto

logger = logging.getLogger(__name__)

Told = Callable[[Any], None]


class Telemetry:
    """Of one endpoint. ``settings`` makes what is told whenever a stream begins, ``told`` gets what the Proxy answers."""

    def __init__(self, channel: ProxyChannel, settings: Callable[[], Any], told: Told) -> None:
        self._channel = channel
        self._settings = settings
        self._told = told
        self._changed = threading.Condition()
        self._version, self._known = 0, -1
        self._sent: deque[int] = deque()
        self._error: RocketMQError | None = None
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._closed = threading.Event()
        self._thread = start_thread(f"rocketmq-telemetry-{channel.address}", self._run)

    def tell(self) -> None:
        """The settings have changed."""
        with self._changed:
            self._version += 1
            self._put()

    def wait(self, deadline: Deadline) -> RocketMQError | None:
        """Until the Proxy has the settings, or has refused them for good; the last error, if there was any, when it has not."""
        with self._changed:
            self._changed.wait_for(lambda: self._known >= self._version or self._hopeless(), deadline.remaining())
            return None if self._known >= self._version else self._error or RocketMQError("the Proxy did not answer")

    def close(self, deadline: Deadline) -> None:
        self._closed.set()
        self._outgoing.put(None)
        with self._changed:
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline.remaining())

    def _hopeless(self) -> bool:
        return self._closed.is_set() or (self._error is not None and not self._error.retriable)

    def _put(self) -> None:
        self._sent.append(self._version)
        self._outgoing.put(proto("TelemetryCommand")(settings=self._settings()))

    def _run(self) -> None:
        pauses = backoff(0.1, 5.0)
        while not self._closed.is_set():
            error = self._end_of(attempt(self._stream))
            with self._changed:
                if self._error is None:  # it has worked since the last one
                    pauses = backoff(0.1, 5.0)
                self._error = error
                self._changed.notify_all()
            if not self._closed.is_set():
                logger.info("the Proxy at %s lost touch: %s", self._channel.address, error)
            self._closed.wait(next(pauses))

    def _end_of(self, stream: Failure | None) -> RocketMQError:
        """Why a stream ended."""
        if stream is None:
            return ConnectionLost("the Proxy ended the stream", self._channel.address)
        if isinstance(stream.error, RocketMQError):
            return stream.error
        stream.log(logger, "the stream of the Proxy at %s failed", self._channel.address)
        return ConnectionLost(f"the stream failed: {stream}", self._channel.address)

    def _stream(self) -> None:
        """One stream, from its beginning to its end; settings first."""
        with self._changed:
            mine: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._outgoing = mine
            self._sent.clear()
            self._put()
            if self._closed.is_set():
                return
            self._call = call = self._channel.stream(TELEMETRY, iter(mine.get, None), None)
        try:
            for command in self._channel.answers(call):
                if command.HasField("settings"):
                    self._told(command.settings)
                    with self._changed:
                        if self._sent:  # each has an answer, in order; a Proxy may also say something by itself
                            self._known = self._sent.popleft()
                        self._error = None
                        self._changed.notify_all()
                elif command.HasField("status") and command.status.code != Code.OK:
                    raise refused(command.status, self._channel.address)
        finally:
            mine.put(None)
            call.cancel()
