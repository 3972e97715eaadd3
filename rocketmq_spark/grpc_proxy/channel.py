"""gRPC channels to the endpoints of a Proxy.

``Endpoints`` chooses an endpoint for each call. Every endpoint serves every topic, so ``Endpoints`` chooses another one while the
preferred endpoint does not answer. ``metadata`` signs a call as ``org.apache.rocketmq.client.java.rpc.Signature`` does: it signs
only the date. ``ProxyChannel`` converts gRPC errors to a ``RocketMQError``.

gRPC does not survive a fork. So a channel is opened with its first call and belongs to one process. If a process has opened a
channel, its forked children open none, because the calls of a child would never end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import grpc

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.base.threads import start_thread
from rocketmq_spark.base.tls_files import ReloadedValue, check_authorities, system_authorities
from rocketmq_spark.errors import ClosedError, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.grpc_proxy.protos import error_from_grpc, proto
from rocketmq_spark.grpc_proxy.tables import TELEMETRY, Rpc
from rocketmq_spark.options import paths

# If there are several endpoints, calls avoid an endpoint for at least this time after a failed connection or a time-out.
AVOID_S = 5.0


class Endpoints:
    """The addresses of a Proxy, and the endpoints that calls avoid at the moment."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._avoided_until: dict[str, float] = {}  # seconds of a monotonic clock, by address
        self._verified_addresses: set[str] = set()  # addresses that have answered since their last failure
        self._next_start_index = 0  # index of the endpoint that the next call without a preferred endpoint tries first
        self._lock = threading.Lock()

    def choose(self, preferred_address: str | None, now_s: float) -> str:
        """Return ``preferred_address``; without it, the address whose turn it is. If calls avoid the chosen address, return the
        next address that calls do not avoid. If calls avoid all addresses, return the chosen address.
        """
        with self._lock:
            if preferred_address in self.addresses:
                start_index = self.addresses.index(preferred_address)
            else:
                start_index, self._next_start_index = (
                    self._next_start_index % len(self.addresses),
                    self._next_start_index + 1,
                )
            candidates = self.addresses[start_index:] + self.addresses[:start_index]
            return next(
                (address for address in candidates if self._avoided_until.get(address, 0.0) <= now_s), candidates[0]
            )

    def record_failure(self, address: str, now_s: float, avoid_s: float = AVOID_S) -> None:
        """Record that an endpoint could not be reached or did not answer. Calls avoid the endpoint for ``avoid_s`` seconds."""
        with self._lock:
            self._avoided_until[address] = now_s + avoid_s
            self._verified_addresses.discard(address)

    def record_contact(self, address: str) -> None:
        """Record that an endpoint answered, even with an error. Calls no longer avoid the endpoint."""
        if address in self._avoided_until:
            with self._lock:
                self._avoided_until.pop(address, None)

    def record_answer(self, address: str) -> None:
        """Record an answer without a gRPC error. From now on, a call to this endpoint may use the whole time of its deadline."""
        self._verified_addresses.add(address)
        self.record_contact(address)

    def call_deadline(self, address: str, deadline: Deadline, untried_count: int) -> Deadline:
        """Return the deadline of a call to ``address``. ``untried_count`` is the number of endpoints that are left to try, this
        endpoint included. An endpoint that has not answered yet gets only its share of the remaining time, because an address
        that drops all packets causes no error before the time is over.
        """
        return (
            deadline if address in self._verified_addresses else deadline.within(deadline.remaining() / untried_count)
        )


PROTOCOL = "v2"
_SIGNATURE_ALGORITHM = "MQv2-HMAC-SHA1"


class SigningKeys(NamedTuple):
    """The keys that sign calls."""

    access_key: str
    secret_key: str
    security_token: str | None = None

    def __repr__(self) -> str:
        return f"Keys(access_key={self.access_key!r})"


def metadata(
    client_id: str, version: str, request_id: str, now: datetime, keys: SigningKeys | None
) -> list[tuple[str, str]]:
    """Return the headers of one call at ``now``. The Proxy requires a ``client_id`` in every call."""
    date = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = [
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", PROTOCOL),
        ("x-mq-client-version", version),
        ("x-mq-client-id", client_id),
        ("x-mq-request-id", request_id),
        ("x-mq-date-time", date),
    ]
    if keys is None:
        return headers
    if keys.security_token:
        headers.append(("x-mq-session-token", keys.security_token))
    signature = hmac.new(keys.secret_key.encode(), date.encode(), hashlib.sha1).hexdigest().upper()
    headers.append(
        (
            "authorization",
            f"{_SIGNATURE_ALGORITHM} Credential={keys.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}",
        )
    )
    return headers


# A Proxy accepts requests of up to 130 MiB, and its answers may be as large as those of its brokers.
_MAX_MESSAGE_BYTES = 128 << 20
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 30_000, 10_000  # as in RocketMQ's Java client
_IDLE_MS = 100_000  # a connection without calls is closed after this time, as over remoting
# The largest message of a telemetry stream, unless option 'maxMessageSize' is larger. A Proxy sends the messages of a telemetry
# stream without a request.
MAX_PUSHED_BYTES = 16 << 20
# gRPC pings while messages arrive, to measure the connection, and the answer to a ping waits behind these messages. So gRPC's
# time-out of pings must be longer than a consumer waits for messages. The default is a minute.
_PING_TIMEOUT_MS = 30_000
_FIRST_RECONNECT_BACKOFF_MS, _MAX_RECONNECT_BACKOFF_MS = 100, 2_000
# Maximum time of one attempt to connect, even if option 'connectTimeout' is longer. gRPC continues an attempt after the end of
# the call that started it.
_MAX_CONNECT_MS = 20_000

# gRPC counts a call before it starts the thread for its answers. If the system has no thread, the channel never delivers answers
# again, and closing or finalizing the channel waits forever. This list keeps such channels, so that they are never finalized.
_leaked_channels: list[grpc.Channel] = []

_MAX_TIMEOUT_S = 365 * 86_400.0
# Ids of processes that have opened a channel: this process, and the processes from which it was forked.
_grpc_processes: set[int] = set()

Headers = Callable[[], list[tuple[str, str]]]
OnAnswer = Callable[[Any], None]


class Tls(NamedTuple):
    """Paths of PEM files. The server's certificate must have the name ``server_name``. Without ``server_name``, the certificate
    must have the host name of the connection.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


class ProxyChannel:
    """The channel to one endpoint, ``host:port``. ``headers`` returns the headers of the next call.

    ``max_pushed_bytes`` is the maximum size of a message that the Proxy sends without a request.
    """

    def __init__(
        self,
        address: str,
        headers: Headers,
        connect_timeout_s: float = 3.0,
        tls: Tls | None = None,
        max_pushed_bytes: int = MAX_PUSHED_BYTES,
    ) -> None:
        self.address = address
        self._max_pushed_bytes = max_pushed_bytes
        self._headers = headers
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()  # no thread waits for anything while it holds this lock
        self._files_lock = threading.Lock()  # held while the TLS files are read
        self._channel: grpc.Channel | None = None
        self._multi_callables: dict[str, Any] = {}  # gRPC's callables of ``_channel``, by name of the rpc
        self._closed = False
        self._tls_files = None if tls is None else ReloadedValue(tls[:3], functools.partial(_credentials, tls))
        self._used_credentials: grpc.ChannelCredentials | None = None  # the credentials of ``_channel``
        # True if the TLS files cannot be read any more. In this case, the channel is dropped when its connection ends.
        self._ends_with_connection = False
        # Streams and asynchronous calls, also of replaced channels. ``close`` cancels them.
        self._active_calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lacks_threads = False  # whether the system had no thread for the last call
        self._last_used_s = time.monotonic()
        self._pending_call_count = 0  # number of calls of ``invoke`` that have no answer yet
        _all_channels.add(self)

    def invoke(self, rpc: Rpc, request: Any, deadline: Deadline) -> Any:
        """Make one call and return its answer, whose status may be an error. Raises ``ConnectionLost``, ``CallTimeout``, ..."""
        with self._lock:
            self._pending_call_count += 1
        try:
            return self._multi_callable(rpc)(request, timeout=_timeout_s(deadline), metadata=self._headers())
        except grpc.RpcError as e:
            raise self._call_error(e) from e
        except ValueError as e:
            raise self._not_sent_error(e) from e
        finally:
            with self._lock:
                self._pending_call_count -= 1
                self._last_used_s = time.monotonic()

    def invoke_async(self, rpc: Rpc, request: Any, deadline: Deadline, on_answer: OnAnswer) -> None:
        """Make one call. A thread of gRPC calls ``on_answer`` once, with the answer or a ``RocketMQError``."""
        call = self._start_call(
            rpc, lambda callable_: callable_.future(request, timeout=_timeout_s(deadline), metadata=self._headers())
        )

        def on_end(ended_call: Any) -> None:
            try:
                answer = ended_call.result()
            except grpc.RpcError as e:
                answer = self._call_error(e)
            except grpc.FutureCancelledError:
                answer = error_from_grpc("CANCELLED", "the channel was closed", self.address, self._tls is not None)
            on_answer(answer)

        call.add_done_callback(on_end)

    def stream(self, rpc: Rpc, request: Any, deadline: Deadline | None) -> Any:
        """Start a call with many answers and return gRPC's object, whose ``cancel`` ends the call. See ``answers``."""
        timeout = None if deadline is None else _timeout_s(deadline)
        return self._start_call(rpc, lambda call: call(request, timeout=timeout, metadata=self._headers()))

    def answers(self, call: Any) -> Iterator[Any]:
        """Yield the answers of a call that ``stream`` returned."""
        try:
            yield from call
        except grpc.RpcError as e:
            raise self._call_error(e) from e

    def close(self) -> None:
        """Close the channel. Running and later calls fail."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            self._multi_callables = {}
            calls = list(self._active_calls)
        if channel is not None:
            channel.close()
        for call in calls:
            call.cancel()

    def close_idle(self, now_s: float) -> None:
        """Close the connection, and end attempts to connect, if there has been no call for ``_IDLE_MS``. A later call opens a new
        connection. Each call of another channel may run this method, so it does not wait.
        """
        if not self._lock.acquire(blocking=False):
            return  # the channel is in use
        try:
            if self._channel is None or self._pending_call_count or 1000 * (now_s - self._last_used_s) < _IDLE_MS:
                return
            if any(call.is_active() for call in self._active_calls):
                return
            channel, self._channel, self._multi_callables = self._channel, None, {}
            is_watched = self._ends_with_connection
        finally:
            self._lock.release()
        if is_watched:  # ``close`` of gRPC waits for the thread that watches the connection, so another thread calls it
            # If no thread can start, the channel is closed with its last reference.
            with contextlib.suppress(RuntimeError):
                start_thread("rocketmq-grpc-close", channel.close)
        else:
            channel.close()

    def _start_call(self, rpc: Rpc, start: Callable[[Any], Any]) -> Any:
        """Start a call, and make sure that gRPC has a thread to deliver its answers."""
        try:
            if self._lacks_threads:
                # Try to start a thread first, so that this method leaks no further channel while the system has no thread.
                start_thread("rocketmq-grpc", _do_nothing).join()
                self._lacks_threads = False
            call = start(self._multi_callable(rpc))
            with self._lock:
                self._active_calls.add(call)
                self._last_used_s = time.monotonic()
            return call
        except ValueError as e:
            raise self._not_sent_error(e) from e
        except RuntimeError as e:
            with self._lock:
                if self._channel is not None:
                    _leaked_channels.append(self._channel)
                self._channel, self._multi_callables, self._lacks_threads = None, {}, True
            raise ConnectionLost(f"there is no thread for the answer: {e}", self.address) from e

    def _multi_callable(self, rpc: Rpc) -> Any:
        self._last_used_s = time.monotonic()
        for idle_channel in _all_channels.due(self._last_used_s):
            idle_channel.close_idle(self._last_used_s)
        credentials = self._renew_credentials()
        multi_callable = self._multi_callables.get(rpc.name)
        if multi_callable is None:
            with self._lock:
                if self._closed:
                    raise ClosedError("the channel was closed", self.address)
                if self._channel is None:
                    self._channel = self._open(credentials)
                # Both attributes are read under the lock, because another thread may replace both.
                channel, multi_callables = self._channel, self._multi_callables
            multi_callable_kind = (
                f"{'stream' if rpc.client_streaming else 'unary'}_{'stream' if rpc.server_streaming else 'unary'}"
            )
            multi_callable = multi_callables[rpc.name] = getattr(channel, multi_callable_kind)(
                rpc.path,
                request_serializer=_serialize,
                response_deserializer=proto(rpc.response).FromString,
            )
        return multi_callable

    def _open(self, credentials_or_error: grpc.ChannelCredentials | OptionError | None) -> grpc.Channel:
        _grpc_processes.add(os.getpid())
        if len(_grpc_processes) > 1:
            raise ClosedError(
                "gRPC does not work in this process, because it was forked from a process that had used gRPC",
                self.address,
                remedy="Start the process with multiprocessing's 'spawn' or 'forkserver', or before the first use of gRPC",
            )
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.client_idle_timeout_ms", _IDLE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
            ("grpc.min_reconnect_backoff_ms", min(_MAX_CONNECT_MS, round(1000 * self._connect_timeout_s))),
            ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.service_config", _service_config(self._max_pushed_bytes)),
        ]
        # Without ``dns:``, gRPC would read some host names as a scheme, such as ``unix`` in unix:8081.
        target = f"dns:///{self.address}"
        if self._tls is None:
            return grpc.insecure_channel(target, options)
        if isinstance(credentials_or_error, OptionError):
            raise credentials_or_error
        self._used_credentials, self._ends_with_connection = credentials_or_error, False
        if self._tls.server_name:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        return grpc.secure_channel(target, credentials_or_error, options)

    def _not_sent_error(self, error: ValueError) -> RocketMQError:
        """Return the error of a call that was not made. gRPC raises ``ValueError`` for a closed channel."""
        return (
            error if isinstance(error, RocketMQError) else ClosedError(f"the channel was closed: {error}", self.address)
        )

    def _call_error(self, error: Any) -> RocketMQError:
        return error_from_grpc(error.code().name, error.details() or "", self.address, self._tls is not None)

    def _renew_credentials(self) -> grpc.ChannelCredentials | OptionError | None:
        """Drop the channel before a call if a TLS file was replaced, because gRPC reconnects with the content that it read first.
        If the files could not be read for too long, the channel is dropped when its connection ends. Returns the credentials for
        a new channel, or the error of the files.

        Reading a pipe or a disk that hangs may take forever. Calls of this channel then wait, but ``close`` does not.
        """
        if self._tls_files is None:
            return None
        try:
            with self._files_lock:
                credentials = self._tls_files.get()
        except OptionError as e:
            return self._end_with_connection(e)
        with self._lock:
            if self._channel is not None and credentials is not self._used_credentials:
                self._channel, self._multi_callables = None, {}
        return credentials

    def _end_with_connection(self, error: OptionError) -> OptionError:
        """Drop the channel when its connection ends. Returns ``error``."""
        with self._lock:
            channel = self._channel
            if channel is None or self._ends_with_connection:
                return error
            self._ends_with_connection = True

        def on_state(state: grpc.ChannelConnectivity) -> None:
            if state is not grpc.ChannelConnectivity.READY:
                channel.unsubscribe(on_state)
                with self._lock:
                    if self._channel is channel:
                        self._channel, self._multi_callables = None, {}

        channel.subscribe(on_state)
        return error


# All channels of the process. Each call also closes the idle connections of other channels, because a channel that is no longer
# used makes no call in which it could close its own connection.
_all_channels: LiveObjects[ProxyChannel] = LiveObjects(_IDLE_MS / 100_000)


def _service_config(max_pushed_bytes: int) -> str:
    """Return gRPC's service config, which gives messages of the telemetry stream a lower limit than answers."""
    service, _, method = TELEMETRY.path.strip("/").rpartition("/")
    method_config = {"name": [{"service": service, "method": method}], "maxResponseMessageBytes": max_pushed_bytes}
    return json.dumps({"methodConfig": [method_config]})


def _do_nothing() -> None:
    pass


def _timeout_s(deadline: Deadline) -> float:
    """Return the remaining time, at most a year, because gRPC treats a deadline that is centuries away as expired."""
    return min(deadline.remaining(), _MAX_TIMEOUT_S)


def _serialize(request: Any) -> bytes:
    """Serialize a request. Bytes are already serialized."""
    return request if isinstance(request, bytes) else bytes(request.SerializeToString())


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Read the TLS files, check them, and return gRPC's credentials. Without the checks, gRPC ends the whole process for a
    certificate without a key or a key without a certificate.
    """
    ca = _read_pem("tlsCaFile", tls.ca_file, _CERTIFICATE_LABEL)
    if ca is None:
        ca = system_authorities()
    else:
        try:
            check_authorities(ca)  # gRPC reports a damaged certificate only as a failed connection
        except OSError as e:
            raise OptionError(f"option 'tlsCaFile' is {tls.ca_file!r}; it is damaged: {e}") from e
    if not ca:  # without authorities, gRPC trusts those that grpcio includes
        raise OptionError(
            "option 'tls' is true, and this system has no authorities to trust",
            remedy="Name the authority of the Proxy's certificate with option 'tlsCaFile'",
        )
    cert = _read_pem("tlsCertFile", tls.cert_file, _CERTIFICATE_LABEL)
    # As over remoting, the certificate's file may also contain its key.
    key_source = ("tlsCertFile", tls.cert_file) if tls.key_file is None else ("tlsKeyFile", tls.key_file)
    return grpc.ssl_channel_credentials(ca, _read_pem(*key_source, _KEY_LABEL), cert)


# In a PEM file, the first line of a certificate and the first line of a key end with these bytes.
_CERTIFICATE_LABEL, _KEY_LABEL = b"CERTIFICATE-----", b"PRIVATE KEY-----"


def _read_pem(option: str, path: str | None, label: bytes) -> bytes | None:
    """Return the content of a PEM file, which must contain ``label``."""
    if path is None:
        return None
    try:
        content = paths.read_pem(paths.expand_home(path, option), option)
    except OSError as e:
        raise OptionError(f"option {option!r} is {path!r}; it cannot be read: {e.strerror}") from e
    if label not in content:
        raise OptionError(
            f"option {option!r} is {path!r}; expected a file in PEM with a {label.decode().strip('-').lower()}"
        )
    return content
