"""One client of a Proxy: its channels, its client id, single requests, and its telemetry streams.

Through the telemetry stream, a client sends its settings and receives the Proxy's. The stream is reopened when it breaks. There
is one stream, with a thread, for each endpoint, because Proxies do not share the settings of clients.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import platform
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.codes import VERSION
from rocketmq_spark.base.threads import Failure, attempt, start_thread
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError, copy_of
from rocketmq_spark.grpc_proxy.channel import PUSHED_BYTES, REST_S, Endpoints, Keys, ProxyChannel, Tls, metadata
from rocketmq_spark.grpc_proxy.protos import proto, refused, set_seconds
from rocketmq_spark.grpc_proxy.tables import TELEMETRY, AddressScheme, ClientType, Code, Language, Rpc

logger = logging.getLogger(__name__)

_numbers = itertools.count()
_GOOD = (Code.OK, Code.MULTIPLE_RESULTS)


class Access(NamedTuple):
    """Connection settings: ``host:port`` of each endpoint, the keys that sign, and the scope that converts names."""

    addresses: tuple[str, ...]
    on_wire: Callable[[str], str]
    keys: Callable[[], Keys | None]
    tls: Tls | None = None
    connect_timeout_s: float = 3.0
    request_timeout_s: float = 3.0
    max_pushed: int = PUSHED_BYTES


class Proxy:
    """One client of a Proxy, shared by all producers of a process with the same connection options."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.host = platform.node() or "localhost"
        self.client_id = f"{self.host}@{os.getpid()}@{next(_numbers)}@{uuid.uuid4().hex[:8]}"
        self.on_wire = access.on_wire
        self._endpoints = Endpoints(access.addresses)
        self.open()
        self._agent = proto("UA")(
            language=Language.PYTHON, version=_version(), platform=platform.platform(), hostname=self.host
        )

    def open(self) -> None:
        """Allow calls, also after ``close``."""
        access = self.access
        self._channels = {
            address: ProxyChannel(address, self._headers, access.connect_timeout_s, access.tls, access.max_pushed)
            for address in access.addresses
        }

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.access.addresses

    def settings(self, kind: ClientType) -> Any:
        """The common settings of clients of a kind."""
        made = proto("Settings")(client_type=kind, user_agent=self._agent)
        made.access_point.CopyFrom(self.endpoints())
        set_seconds(made.request_timeout, self.access.request_timeout_s)
        return made

    def resource(self, name: str) -> Any:
        """A topic or group as a ``Resource``."""
        return proto("Resource")(name=self.on_wire(name))

    def channel(self, home: str | None = None) -> ProxyChannel:
        """The channel to use now: that of the ``home`` endpoint unless it is avoided."""
        return self._channels[self._endpoints.pick(home, time.monotonic())]

    def at(self, address: str) -> ProxyChannel:
        """The channel of one endpoint."""
        return self._channels[address]

    def ask(self, rpc: Rpc, request: Any, deadline: Deadline, topic: str | None = None, home: str | None = None) -> Any:
        """Returns a successful answer, or raises ``RocketMQError``. Tries another endpoint if one cannot be reached."""
        for left in range(len(self.addresses), 0, -1):
            channel = self.channel(home)
            share = self._endpoints.share(channel.address, deadline, left)
            try:
                answer = channel.ask(rpc, request, share)
            except (ConnectionLost, CallTimeout) as e:
                self.noted(channel.address, e)
                if left == 1 or deadline.expired or (share is deadline and isinstance(e, CallTimeout)):
                    raise
                continue
            self.noted(channel.address)
            return checked(answer, channel.address, topic)
        raise ConnectionLost("there is no endpoint")

    def noted(self, address: str, error: RocketMQError | None = None, took_s: float = 0.0) -> None:
        """Note the result of a call to an endpoint. After a failure that ``took_s``, the endpoint is avoided for at least as
        long.
        """
        if isinstance(error, ConnectionLost | CallTimeout):
            self._endpoints.failed(address, time.monotonic(), max(REST_S, took_s))
        elif error is None:
            self._endpoints.answered(address)
        else:
            self._endpoints.worked(address)

    def endpoints(self, address: str | None = None) -> Any:
        """The Proxy's address in the form of its routes."""
        made = proto("Endpoints")()
        for one in (address,) if address else self.addresses:
            host, _, port = one.rpartition(":")
            made.scheme = _scheme(host.strip("[]"))
            made.addresses.add(host=host.strip("[]"), port=int(port))
        return made

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _headers(self) -> list[tuple[str, str]]:
        return metadata(self.client_id, _version(), uuid.uuid4().hex, datetime.now(UTC), self.access.keys())


def checked(answer: Any, address: str, topic: str | None = None) -> Any:
    """Returns the answer if its status is a success; otherwise raises the error of the status."""
    if answer.status.code not in _GOOD:
        raise refused(answer.status, address, topic)
    return answer


def _version() -> str:
    return f"rocketmq-spark-{VERSION}"


def _scheme(host: str) -> AddressScheme:
    try:
        return AddressScheme.IPv4 if ipaddress.ip_address(host).version == 4 else AddressScheme.IPv6
    except ValueError:
        return AddressScheme.DOMAIN_NAME


OnSettings = Callable[[Any], None]

_HALF = "recover_orphaned_transaction_command"
# An overloaded Proxy silently drops settings. After this time without an answer, the stream is reopened, because it would be
# unknown to which settings a later answer belongs.
_ANSWER_S = 30.0


class Telemetry:
    """The telemetry stream of one endpoint. ``settings`` makes the first message of each stream; ``on_settings`` receives the
    Proxy's answers, ``on_half`` its checks of half messages.
    """

    def __init__(
        self,
        channel: ProxyChannel,
        settings: Callable[[], Any],
        on_settings: OnSettings,
        on_half: OnSettings = lambda command: None,
    ) -> None:
        self._on_half = on_half
        self._channel = channel
        self._settings = settings
        self._on_settings = on_settings
        self._lock = threading.RLock()  # ``with`` takes the lock itself, so Ctrl-C cannot leave it locked
        self._changed = threading.Condition(self._lock)
        self._version, self._known = 0, -1
        self._sent: deque[tuple[int, float]] = deque()  # versions of unanswered settings, and when they were sent
        self._error: RocketMQError | None = None
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._closed = threading.Event()
        self._thread = start_thread(f"rocketmq-telemetry-{channel.address}", self._run)

    def tell(self) -> None:
        """Send changed settings. Answers to the old ones do not count any more, and a stream that ended is reopened at once."""
        with self._lock:
            self._version += 1
            self._error = None
            self._put()
            self._changed.notify_all()
        self._give_up()

    def repeat(self) -> None:
        """Send the same settings again, to receive the Proxy's current answer. Does nothing while an answer is missing."""
        with self._lock:
            if not self._sent:
                self._put()
        self._give_up()

    def wait(self, deadline: Deadline, patient: bool = True) -> RocketMQError | None:
        """Wait until the Proxy has accepted the settings (then None), or permanently rejected them. Returns the last error, or a
        time-out.

        Without ``patient``, a temporary error ends the wait, too.
        """

        def over() -> bool:
            failed = not patient and self._error is not None
            return self._known >= self._version or failed or self._hopeless()

        with self._lock:
            self._changed.wait_for(over, deadline.remaining())
            if self._known >= self._version and not self._refused():
                return None
            if self._error is not None:
                return copy_of(self._error)
            return CallTimeout("the Proxy did not answer in time", self._channel.address)

    def close(self, deadline: Deadline) -> None:
        self._closed.set()
        self._outgoing.put(None)
        with self._lock:
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline.remaining())

    def _hopeless(self) -> bool:
        return self._closed.is_set() or self._refused()

    def _refused(self) -> bool:
        return self._error is not None and not self._error.retriable

    def _give_up(self) -> None:
        """End a stream whose answer is missing for too long; the next one begins with the newest settings."""
        with self._lock:
            late = bool(self._sent) and time.monotonic() - self._sent[0][1] > _ANSWER_S
            call = self._call if late else None
        if call is not None:
            call.cancel()

    def _put(self) -> None:
        command = proto("TelemetryCommand")(settings=self._settings())  # first: if it fails, no answer is expected
        self._sent.append((self._version, time.monotonic()))
        self._outgoing.put(command)

    def _run(self) -> None:
        pauses = backoff(0.1, 5.0)
        while not self._closed.is_set():
            error = self._end_of(attempt(self._stream))
            if not self._closed.is_set():
                logger.info("lost the stream to the Proxy at %s: %s", self._channel.address, error)
            with self._lock:
                if self._error is None:  # the stream has worked since the last error
                    pauses = backoff(0.1, 5.0)
                about = self._sent[0][0] if self._sent else self._version
                if about == self._version or error.retriable:  # a rejection of old settings does not count
                    self._error = error
                self._changed.notify_all()
                self._pause(about, next(pauses))

    def _pause(self, said: int, seconds: float) -> None:
        """Wait for ``seconds``, or until there are newer settings."""
        self._changed.wait_for(lambda: self._closed.is_set() or self._version != said, seconds)

    def _end_of(self, stream: Failure | None) -> RocketMQError:
        """Why a stream ended."""
        if stream is None:
            return ConnectionLost("the Proxy ended the stream", self._channel.address)
        if isinstance(stream.error, RocketMQError):
            return stream.error
        stream.log(logger, "the stream of the Proxy at %s failed", self._channel.address)
        return ConnectionLost(f"the stream failed: {stream}", self._channel.address)

    def _stream(self) -> None:
        """Run one stream until it ends; it begins with the settings."""
        with self._lock:
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
                    self._on_settings(command.settings)
                    with self._lock:
                        if self._sent:  # answers arrive in order; a Proxy may also send settings unasked
                            self._known, _ = self._sent.popleft()
                        self._error = None
                        self._changed.notify_all()
                elif command.HasField(_HALF):
                    self._on_half(getattr(command, _HALF))
                elif command.HasField("status") and command.status.code != Code.OK:
                    raise refused(command.status, self._channel.address)
        finally:
            mine.put(None)
            call.cancel()
