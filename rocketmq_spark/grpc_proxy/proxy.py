"""One client of a Proxy: its channels, its client id, single requests, and its telemetry streams.

Through the telemetry stream a consumer sends its settings and receives the Proxy's; it is opened again when it breaks. There
is one stream, with a thread, for each endpoint, because every Proxy keeps the settings of its clients by itself.
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
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError
from rocketmq_spark.grpc_proxy.channel import REST_S, Endpoints, Keys, ProxyChannel, Tls, metadata
from rocketmq_spark.grpc_proxy.facts import TELEMETRY, AddressScheme, ClientType, Code, Language, Rpc
from rocketmq_spark.grpc_proxy.protos import proto, refused, set_seconds

logger = logging.getLogger(__name__)

_numbers = itertools.count()
_GOOD = (Code.OK, Code.MULTIPLE_RESULTS)


class Access(NamedTuple):
    """How a Proxy is reached: ``host:port`` of each endpoint, who signs, and how names stand on the wire."""

    addresses: tuple[str, ...]
    on_wire: Callable[[str], str]
    keys: Callable[[], Keys | None]
    tls: Tls | None = None
    connect_timeout_s: float = 3.0
    request_timeout_s: float = 3.0


class Proxy:
    """Shared by all producers and consumers of a process with the same connection options."""

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
        """Calls from now on are made, also after ``close``."""
        access = self.access
        self._channels = {
            address: ProxyChannel(address, self._headers, access.connect_timeout_s, access.tls)
            for address in access.addresses
        }

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.access.addresses

    def settings(self, kind: ClientType) -> Any:
        """What all clients of a kind say of themselves first."""
        made = proto("Settings")(client_type=kind, user_agent=self._agent)
        made.access_point.CopyFrom(self.endpoints())
        set_seconds(made.request_timeout, self.access.request_timeout_s)
        return made

    def resource(self, name: str) -> Any:
        """A topic or group."""
        return proto("Resource")(name=self.on_wire(name))

    def channel(self, home: str | None = None) -> ProxyChannel:
        """The one to use now: of the ``home`` endpoint if that answers."""
        return self._channels[self._endpoints.pick(home, time.monotonic())]

    def at(self, address: str) -> ProxyChannel:
        """That of one endpoint."""
        return self._channels[address]

    def ask(self, rpc: Rpc, request: Any, deadline: Deadline, topic: str | None = None, home: str | None = None) -> Any:
        """A good answer; raises ``RocketMQError``. Another endpoint is asked when one cannot be reached."""
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
        """How a call to an endpoint went; what ``took_s`` in vain is not tried again for as long."""
        if isinstance(error, ConnectionLost | CallTimeout):
            self._endpoints.failed(address, time.monotonic(), max(REST_S, took_s))
        elif error is None:
            self._endpoints.answered(address)
        else:
            self._endpoints.worked(address)

    def endpoints(self, address: str | None = None) -> Any:
        """The address of the Proxy in the form that its routes use."""
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
    """The answer if its status is good; raises what it says otherwise."""
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
# A Proxy that is overloaded drops settings without a word. So long an answer is awaited, then the stream is made anew: which
# settings a later answer is about would not be known.
_ANSWER_S = 30.0


class Telemetry:
    """Of one endpoint. ``settings`` makes the first message of each stream; ``on_settings`` receives the answers of the Proxy,
    ``on_half`` its questions about half messages.
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
        self._lock = threading.RLock()  # in ``with`` itself, for Ctrl-C (as in consumer.pull.polls)
        self._changed = threading.Condition(self._lock)
        self._version, self._known = 0, -1
        self._sent: deque[tuple[int, float]] = deque()  # what has no answer yet, and since when
        self._error: RocketMQError | None = None
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._closed = threading.Event()
        self._thread = start_thread(f"rocketmq-telemetry-{channel.address}", self._run)

    def tell(self) -> None:
        """The settings have changed: what was said of the old ones does not count, and a stream that ended begins at once."""
        with self._lock:
            self._version += 1
            self._error = None
            self._put()
            self._changed.notify_all()
        self._give_up()

    def repeat(self) -> None:
        """Send the same settings again, to receive what the Proxy says of them now; not while an answer is awaited."""
        with self._lock:
            if not self._sent:
                self._put()
        self._give_up()

    def wait(self, deadline: Deadline, patient: bool = True) -> RocketMQError | None:
        """Until the Proxy has the settings, or has refused them for good; the last error, if there was any, when it has not.

        Without ``patient`` any error ends that, also one that may pass.
        """

        def over() -> bool:
            failed = not patient and self._error is not None
            return self._known >= self._version or failed or self._hopeless()

        with self._lock:
            self._changed.wait_for(over, deadline.remaining())
            if self._known >= self._version and not self._refused():
                return None
            return self._error or CallTimeout("the Proxy did not answer in time", self._channel.address)

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
        """End a stream that owes an answer for too long; the next one begins with the newest settings."""
        with self._lock:
            late = bool(self._sent) and time.monotonic() - self._sent[0][1] > _ANSWER_S
            call = self._call if late else None
        if call is not None:
            call.cancel()

    def _put(self) -> None:
        command = proto("TelemetryCommand")(settings=self._settings())  # may fail, and then no answer is owed
        self._sent.append((self._version, time.monotonic()))
        self._outgoing.put(command)

    def _run(self) -> None:
        pauses = backoff(0.1, 5.0)
        while not self._closed.is_set():
            error = self._end_of(attempt(self._stream))
            if not self._closed.is_set():
                logger.info("lost the stream to the Proxy at %s: %s", self._channel.address, error)
            with self._lock:
                if self._error is None:  # it has worked since the last one
                    pauses = backoff(0.1, 5.0)
                about = self._sent[0][0] if self._sent else self._version
                if about == self._version or error.retriable:  # settings that were refused may be others by now
                    self._error = error
                self._changed.notify_all()
                self._pause(about, next(pauses))

    def _pause(self, said: int, seconds: float) -> None:
        """Until there is something new to say."""
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
        """One stream, from its beginning to its end; settings first."""
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
                        if self._sent:  # each has an answer, in order; a Proxy may also say something by itself
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
