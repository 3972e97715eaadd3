"""A client of a Proxy: its channels, its client id, single requests, and its telemetry streams.

A client sends its settings through a telemetry stream and receives the Proxy's settings. There is one stream, with one thread,
for each endpoint, because Proxies do not share the settings of clients. A stream that ends is opened again.
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
from rocketmq_spark.base.threads import Failure, capture, start_thread
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError, copy_error
from rocketmq_spark.grpc_proxy.channel import (
    AVOID_S,
    MAX_PUSHED_BYTES,
    Endpoints,
    ProxyChannel,
    SigningKeys,
    Tls,
    metadata,
)
from rocketmq_spark.grpc_proxy.protos import error_from_status, proto, set_seconds
from rocketmq_spark.grpc_proxy.tables import TELEMETRY, AddressScheme, ClientType, Code, Language, Rpc

logger = logging.getLogger(__name__)

_client_numbers = itertools.count()
_SUCCESS_CODES = (Code.OK, Code.MULTIPLE_RESULTS)


class ProxyConnectOptions(NamedTuple):
    """Options of the connections to a Proxy.

    ``addresses`` are ``host:port``, one for each endpoint. ``name_on_wire`` converts names to names on the wire. ``keys``
    returns the current keys that sign calls; None without authentication.
    """

    addresses: tuple[str, ...]
    name_on_wire: Callable[[str], str]
    keys: Callable[[], SigningKeys | None]
    tls: Tls | None = None
    connect_timeout_s: float = 3.0
    request_timeout_s: float = 3.0
    max_pushed_bytes: int = MAX_PUSHED_BYTES


class Proxy:
    """A client of a Proxy. Producers of a process with the same connection options share a client; each consumer has its own."""

    def __init__(self, connect_options: ProxyConnectOptions) -> None:
        self.connect_options = connect_options
        self.host = platform.node() or "localhost"
        self.client_id = f"{self.host}@{os.getpid()}@{next(_client_numbers)}@{uuid.uuid4().hex[:8]}"
        self.name_on_wire = connect_options.name_on_wire
        self._endpoints = Endpoints(connect_options.addresses)
        self.open()
        self._user_agent = proto("UA")(
            language=Language.PYTHON, version=_version(), platform=platform.platform(), hostname=self.host
        )

    def open(self) -> None:
        """Create the channels. After ``close``, calls are possible again."""
        options = self.connect_options
        self._channels = {
            address: ProxyChannel(
                address, self._headers, options.connect_timeout_s, options.tls, options.max_pushed_bytes
            )
            for address in options.addresses
        }

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.connect_options.addresses

    def settings(self, client_type: ClientType) -> Any:
        """Return the settings that all clients of a type have in common."""
        settings = proto("Settings")(client_type=client_type, user_agent=self._user_agent)
        settings.access_point.CopyFrom(self.endpoints())
        set_seconds(settings.request_timeout, self.connect_options.request_timeout_s)
        return settings

    def resource(self, name: str) -> Any:
        """Return a topic or group as a ``Resource``."""
        return proto("Resource")(name=self.name_on_wire(name))

    def channel(self, preferred_address: str | None = None) -> ProxyChannel:
        """Return the channel of the endpoint that ``Endpoints.choose`` returns for ``preferred_address``."""
        return self._channels[self._endpoints.choose(preferred_address, time.monotonic())]

    def channel_of(self, address: str) -> ProxyChannel:
        """Return the channel of one endpoint."""
        return self._channels[address]

    def request(
        self, rpc: Rpc, request: Any, deadline: Deadline, topic: str | None = None, preferred_address: str | None = None
    ) -> Any:
        """Return a successful answer, or raise ``RocketMQError``. If an endpoint cannot be reached, tries the next endpoint."""
        for untried_count in range(len(self.addresses), 0, -1):
            channel = self.channel(preferred_address)
            call_deadline = self._endpoints.call_deadline(channel.address, deadline, untried_count)
            try:
                answer = channel.invoke(rpc, request, call_deadline)
            except (ConnectionLost, CallTimeout) as e:
                self.record_result(channel.address, e)
                if untried_count == 1 or deadline.expired or (call_deadline is deadline and isinstance(e, CallTimeout)):
                    raise
                continue
            self.record_result(channel.address)
            return require_success(answer, channel.address, topic)
        raise ConnectionLost("there is no endpoint")

    def record_result(self, address: str, error: RocketMQError | None = None, duration_s: float = 0.0) -> None:
        """Record the result of a call to an endpoint. After a call without an answer, calls avoid the endpoint for at least
        ``duration_s``, the duration of this call.
        """
        if isinstance(error, ConnectionLost | CallTimeout):
            self._endpoints.record_failure(address, time.monotonic(), max(AVOID_S, duration_s))
        elif error is None:
            self._endpoints.record_answer(address)
        else:
            self._endpoints.record_contact(address)

    def endpoints(self, address: str | None = None) -> Any:
        """Return all addresses, or one, as ``Endpoints``."""
        endpoints = proto("Endpoints")()
        for chosen_address in (address,) if address else self.addresses:
            host, _, port = chosen_address.rpartition(":")
            endpoints.scheme = _address_scheme(host.strip("[]"))
            endpoints.addresses.add(host=host.strip("[]"), port=int(port))
        return endpoints

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _headers(self) -> list[tuple[str, str]]:
        return metadata(self.client_id, _version(), uuid.uuid4().hex, datetime.now(UTC), self.connect_options.keys())


def require_success(answer: Any, address: str, topic: str | None = None) -> Any:
    """Return the answer if its status is a success; otherwise raise the error of the status."""
    if answer.status.code not in _SUCCESS_CODES:
        raise error_from_status(answer.status, address, topic)
    return answer


def _version() -> str:
    return f"rocketmq-spark-{VERSION}"


def _address_scheme(host: str) -> AddressScheme:
    try:
        return AddressScheme.IPv4 if ipaddress.ip_address(host).version == 4 else AddressScheme.IPv6
    except ValueError:
        return AddressScheme.DOMAIN_NAME


OnSettings = Callable[[Any], None]

_HALF_CHECK = "recover_orphaned_transaction_command"
# An overloaded Proxy silently drops settings. After this time without an answer, the client opens a new stream. On the old
# stream, the client could take the answer to later settings for the missing answer.
_SETTINGS_TIMEOUT_S = 30.0


class TelemetryStream:
    """The telemetry stream of one endpoint, with its thread.

    ``make_settings`` returns the settings to send. ``on_settings`` receives the Proxy's settings, ``on_half_check`` its checks
    of half messages; both are called on the thread of the stream.
    """

    def __init__(
        self,
        channel: ProxyChannel,
        make_settings: Callable[[], Any],
        on_settings: OnSettings,
        on_half_check: OnSettings = lambda command: None,
    ) -> None:
        self._on_half_check = on_half_check
        self._channel = channel
        self._make_settings = make_settings
        self._on_settings = on_settings
        # ``with`` blocks take the lock itself, not the condition, so that Ctrl-C cannot leave the lock locked.
        self._lock = threading.RLock()
        self._change_condition = threading.Condition(self._lock)
        self._settings_version = 0  # incremented when the settings change
        self._accepted_version = -1  # the last version that the Proxy has accepted
        self._unanswered_settings: deque[tuple[int, float]] = (
            deque()
        )  # version and time of sending of unanswered settings
        self._error: RocketMQError | None = None  # the error of the last stream; None after an answer or new settings
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages to send; None ends the stream
        self._call: Any = None  # gRPC's call of the current stream
        self._closed_event = threading.Event()
        self._thread = start_thread(f"rocketmq-telemetry-{channel.address}", self._run_streams)

    def send_settings(self) -> None:
        """Send changed settings. Answers to earlier settings no longer count. If the stream has ended, a new stream is opened at
        once.
        """
        with self._lock:
            self._settings_version += 1
            self._error = None
            self._enqueue_settings()
            self._change_condition.notify_all()
        self._end_if_late()

    def resend_settings(self) -> None:
        """Send the same settings again, to receive the Proxy's current settings. Sends nothing while an answer is missing."""
        with self._lock:
            if not self._unanswered_settings:
                self._enqueue_settings()
        self._end_if_late()

    def wait(self, deadline: Deadline, waits_through_errors: bool = True) -> RocketMQError | None:
        """Wait until the Proxy has accepted or permanently rejected the settings. Returns None if the Proxy has accepted the
        settings; otherwise the last error, or a time-out.

        Without ``waits_through_errors``, a temporary error ends the wait, too.
        """

        def is_over() -> bool:
            ends_early = not waits_through_errors and self._error is not None
            return self._accepted_version >= self._settings_version or ends_early or self._cannot_succeed()

        with self._lock:
            self._change_condition.wait_for(is_over, deadline.remaining())
            if self._accepted_version >= self._settings_version and not self._is_rejected():
                return None
            if self._error is not None:
                return copy_error(self._error)
            return CallTimeout("the Proxy did not answer in time", self._channel.address)

    def close(self, deadline: Deadline) -> None:
        self._closed_event.set()
        self._outgoing.put(None)
        with self._lock:
            call = self._call
            self._change_condition.notify_all()
        if call is not None:
            call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline.remaining())

    def _cannot_succeed(self) -> bool:
        return self._closed_event.is_set() or self._is_rejected()

    def _is_rejected(self) -> bool:
        return self._error is not None and not self._error.retriable

    def _end_if_late(self) -> None:
        """End the stream if an answer has been missing for too long. The next stream begins with the newest settings."""
        with self._lock:
            is_late = (
                bool(self._unanswered_settings)
                and time.monotonic() - self._unanswered_settings[0][1] > _SETTINGS_TIMEOUT_S
            )
            call = self._call if is_late else None
        if call is not None:
            call.cancel()

    def _enqueue_settings(self) -> None:
        # ``_make_settings`` is called first, because it may raise an error. In this case, no settings are sent and no answer is
        # expected.
        command = proto("TelemetryCommand")(settings=self._make_settings())
        self._unanswered_settings.append((self._settings_version, time.monotonic()))
        self._outgoing.put(command)

    def _run_streams(self) -> None:
        pauses = backoff(0.1, 5.0)
        while not self._closed_event.is_set():
            error = self._stream_error(capture(self._run_stream))
            if not self._closed_event.is_set():
                logger.info("lost the stream to the Proxy at %s: %s", self._channel.address, error)
            with self._lock:
                if self._error is None:  # the Proxy has accepted settings since the last error
                    pauses = backoff(0.1, 5.0)
                version = self._unanswered_settings[0][0] if self._unanswered_settings else self._settings_version
                if (
                    version == self._settings_version or error.retriable
                ):  # a permanent error that answers old settings is ignored
                    self._error = error
                self._change_condition.notify_all()
                self._pause(version, next(pauses))

    def _pause(self, version: int, seconds: float) -> None:
        """Wait for ``seconds``, or until there are settings newer than ``version``."""
        self._change_condition.wait_for(
            lambda: self._closed_event.is_set() or self._settings_version != version, seconds
        )

    def _stream_error(self, failure: Failure | None) -> RocketMQError:
        """Return the error with which a stream ended. ``failure`` is None if the Proxy ended the stream."""
        if failure is None:
            return ConnectionLost("the Proxy ended the stream", self._channel.address)
        if isinstance(failure.error, RocketMQError):
            return failure.error
        failure.log(logger, "the stream of the Proxy at %s failed", self._channel.address)
        return ConnectionLost(f"the stream failed: {failure}", self._channel.address)

    def _run_stream(self) -> None:
        """Run one stream until it ends. First send the settings."""
        with self._lock:
            outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._outgoing = outgoing
            self._unanswered_settings.clear()
            self._enqueue_settings()
            if self._closed_event.is_set():
                return
            self._call = call = self._channel.stream(TELEMETRY, iter(outgoing.get, None), None)
        try:
            for command in self._channel.answers(call):
                if command.HasField("settings"):
                    self._on_settings(command.settings)
                    with self._lock:
                        # Answers arrive in order. A Proxy may also send settings that are no answer.
                        if self._unanswered_settings:
                            self._accepted_version, _ = self._unanswered_settings.popleft()
                        self._error = None
                        self._change_condition.notify_all()
                elif command.HasField(_HALF_CHECK):
                    self._on_half_check(getattr(command, _HALF_CHECK))
                elif command.HasField("status") and command.status.code != Code.OK:
                    raise error_from_status(command.status, self._channel.address)
        finally:
            outgoing.put(None)
            call.cancel()
