"""Sockets to servers: connecting, TLS, and reading and writing without blocking.

Only this module, ``connection`` and ``bulk`` see an ``OSError``; ``to_rocketmq_error`` converts each ``OSError`` to a
``RocketMQError``. A ``SocketChannel`` is used by one thread at a time, with or without TLS.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.base import hosts
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.tls_files import ReloadedValue
from rocketmq_spark.errors import CallTimeout, CertificateRefused, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.options import paths

# If the peer's machine confirms no bytes for this time, the connection is treated as broken. Without this limit, the operating
# system would retry for a quarter of an hour. This limit works on Linux only; on other systems, ``STALL_S`` of ``connection``
# applies.
MAX_UNCONFIRMED_S = 15.0
# The message of an error begins with this text if there is no TCP connection.
CANNOT_CONNECT = "cannot connect"


class DropUnsent(enum.Enum):
    """When the operating system drops the unsent bytes of a closed connection. Bytes that are not dropped are still sent after
    the close, even over a very slow network.
    """

    NEVER = "never"
    ON_CLOSE = "this side closes it while a request has no answer"
    ON_EXIT = "also when this process ends"


class UndeliveredPolicy(NamedTuple):
    """Unsent bytes are dropped if the peer's machine has confirmed no bytes for ``max_unconfirmed_s`` seconds. ``drop_unsent``
    says when they are also dropped at the close of the connection.
    """

    max_unconfirmed_s: float = MAX_UNCONFIRMED_S
    drop_unsent: DropUnsent = DropUnsent.NEVER


DEFAULT_UNDELIVERED_POLICY = UndeliveredPolicy()


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Which certificates to trust and to present, as paths of PEM files."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: str | None = None
    check_hostname: bool = True

    def files(self) -> dict[str, str | None]:
        """The paths of authority, certificate and key, by their options."""
        return {"tlsCaFile": self.ca_file, "tlsCertFile": self.cert_file, "tlsKeyFile": self.key_file}

    def checked(self) -> TlsSettings:
        """Return these settings. Raises ``OptionError`` for files that ``ROCKETMQ_SPARK_PATHS`` does not allow."""
        for option, path in self.files().items():
            if path is not None:
                paths.check_confined(Path(path), option)
        return self

    def __repr__(self) -> str:
        return (
            f"TlsSettings(ca_file={self.ca_file!r}, cert_file={self.cert_file!r}, check_hostname={self.check_hostname})"
        )


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` at the last colon; IPv6 literals are ``[addr]:port``. Raises ``ConnectionLost`` if ``address`` is
    malformed.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if (
        not host
        or "[" in host
        or "]" in host
        or not (port.isascii() and port.isdecimal() and len(port) <= 5)
        or int(port) > 65535
    ):
        # Options are checked earlier, so a server reported this address. The error is retriable, because the server may report
        # another address later.
        raise ConnectionLost(
            f"{address!r} is not an address of the form host:port", remedy="Check the address that brokers register"
        )
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is ``localhost`` or an address of the loopback interface. Other names are not resolved."""
    return hosts.is_loopback(address.rpartition(":")[0].removeprefix("[").removesuffix("]"))


# The cache is limited, because the same file can have any number of paths, and the context of large files takes several
# megabytes.
_MAX_CONTEXTS = 64


@functools.lru_cache(_MAX_CONTEXTS)
def _reloaded_context(tls: TlsSettings) -> ReloadedValue[ssl.SSLContext]:
    return ReloadedValue((tls.ca_file, tls.cert_file, tls.key_file), functools.partial(_context, tls))


def ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context for these settings. The chain of certificates is always checked; the host name is checked unless
    this check is disabled.

    The last 64 contexts are cached, and loaded again when a file is replaced, because certificates are rotated while programs
    run. While files cannot be read, a cached context stays in use (``ReloadedValue``); a context that has left the cache cannot
    be loaded again.
    """
    try:
        return _reloaded_context(tls).get()
    except (OSError, ssl.SSLError) as e:
        raise OptionError(
            f"the TLS files cannot be used: {e}",
            remedy="Check options 'tlsCaFile', 'tlsCertFile', 'tlsKeyFile' and 'tlsKeyPassword'",
        ) from e


def _context(tls: TlsSettings) -> ssl.SSLContext:
    with contextlib.ExitStack() as exit_stack:
        ca, cert, key = (
            None if path is None else exit_stack.enter_context(paths.pem_copy(paths.expand_home(path, option), option))
            for option, path in tls.files().items()
        )
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = tls.check_hostname
        if cert:
            # Without a password, OpenSSL would prompt for one on the terminal and ignore signals while it waits.
            context.load_cert_chain(cert, key, tls.key_password or "")
    return context


def connect(
    address: str,
    deadline: Deadline,
    tls: TlsSettings | None,
    undelivered_policy: UndeliveredPolicy = DEFAULT_UNDELIVERED_POLICY,
) -> socket.socket:
    """Return a connected blocking socket, encrypted if ``tls`` is given.

    On Linux, the system drops unsent bytes if the peer's machine has confirmed no bytes for the time in ``undelivered_policy``,
    even after this process has ended.

    Raises ``ConnectionLost``, ``CertificateRefused`` and ``CallTimeout``.
    """
    host, port = parse_address(address)
    context = ssl_context(tls.checked()) if tls else None
    try:
        sock = _connect_any(host, port, deadline)
    except OSError as e:
        raise to_rocketmq_error(e, address, CANNOT_CONNECT) from e
    except UnicodeError as e:  # a part of the host name is empty or too long
        raise ConnectionLost(f"{host!r} is not a host name", address) from e
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * undelivered_policy.max_unconfirmed_s)
            )
        if undelivered_policy.drop_unsent is DropUnsent.ON_EXIT:
            _drop_unsent(sock)
        if context:
            sock.settimeout(max(0.001, deadline.remaining()))
            sock = context.wrap_socket(sock, server_hostname=host)
    except OSError as e:
        sock.close()
        handshake_error = to_rocketmq_error(e, address, "the TLS handshake failed")
        if tls is not None and isinstance(e, ssl.SSLCertVerificationError) and e.verify_code in _NAME_MISMATCH:
            handshake_error.remedy = _remedy_for_name(address, deadline, tls)
        raise handshake_error from e
    return sock


def _connect_any(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first address of a host that accepts the connection. Each address gets an equal share of the time that is
    left until ``deadline``, so a host with many addresses takes no longer than a host with one. The lookup of the host's name
    has no time limit.

    Raises ``ConnectionRefusedError`` only if all addresses that this machine can use refuse. If an attempt fails in another
    way, such as a timeout, raises that error, because the server may be up.
    """
    addresses = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
    failures: list[OSError] = []
    for remaining_count, (family, socket_type, protocol, _, socket_address) in zip(
        range(len(addresses), 0, -1), addresses, strict=True
    ):
        if remaining_count < len(addresses) and deadline.expired:
            failures.append(TimeoutError())
            break
        try:
            sock = socket.socket(family, socket_type, protocol)
        except OSError as e:  # this machine may not support addresses of this family
            failures.append(e)
            continue
        try:
            sock.settimeout(max(0.001, deadline.remaining() / remaining_count))
            sock.connect(socket_address)
        except OSError as e:
            sock.close()
            failures.append(e)
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise max(reversed(failures), key=_significance, default=OSError(f"{host} has no address"))


# These errors mean that this machine cannot use an address; they say nothing about the server.
_UNUSABLE_ADDRESS_ERRORS = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH)


def _significance(failure: OSError) -> int:
    """Return 2 if the server may listen at the address, 1 if the address refuses, 0 if this machine cannot use the address."""
    if failure.errno in _UNUSABLE_ADDRESS_ERRORS:
        return 0
    return 1 if isinstance(failure, ConnectionRefusedError) else 2


# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_NAME_MISMATCH = (62, 64)


def _remedy_for_name(address: str, deadline: Deadline, tls: TlsSettings) -> str:
    """Return the remedy for a certificate with another name. OpenSSL checks the name before signatures and dates. So a second
    handshake without the check of the name shows whether only the name differs. Without ``tlsCaFile``, the remedy does not
    suggest to disable this check, because anybody can get a certificate of a public authority.
    """
    remedy = "Connect to a name in the certificate (options 'nameServer' and 'addressMap')"
    if tls.ca_file is None:
        return remedy
    try:
        connect(address, deadline, replace(tls, check_hostname=False)).close()
    except RocketMQError as e:
        return f"{remedy}. Without the check of the name: {e.message}"
    return f"{remedy}, or set 'tlsCheckHostname' to false: only the name differs"


def _drop_unsent(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def to_rocketmq_error(error: OSError, address: str, problem: str, is_first_request: bool = False) -> RocketMQError:
    """Return the ``RocketMQError`` for an ``OSError``. ``is_first_request`` says that the connection has not received an answer
    yet.
    """
    if isinstance(error, TimeoutError):
        return CallTimeout(f"{problem}: no progress in time", address)
    if isinstance(error, ssl.SSLCertVerificationError):
        return CertificateRefused(
            f"{problem}: {error.verify_message}",
            address,
            remedy="Name the authority of the certificate with option 'tlsCaFile'",
        )
    if is_first_request and isinstance(error, ConnectionResetError | BrokenPipeError):
        return closed_by_peer_error(address, is_first_request)
    reason = error.strerror or str(error) or type(error).__name__
    return ConnectionLost(f"{problem}: {reason}", address)


def closed_by_peer_error(address: str, is_first_request: bool) -> ConnectionLost:
    """The error if the server closes the connection. If even the first request got no answer, usually only one side
    uses TLS.
    """
    remedy = (
        "If the server demands TLS or a client certificate, set option 'tls' and its files"
        if is_first_request
        else None
    )
    return ConnectionLost("the server closed the connection without an answer", address, remedy=remedy)


# The interval of checks for expired asynchronous requests, and for changes by other threads.
TICK_S = 0.1


class SocketChannel:
    """A connected socket, with the queued bytes that it has not accepted yet.

    One thread reads, and callers ensure that only one thread at a time writes. The lock in this class is held only while bytes
    move.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        # The time since when the socket has accepted no bytes; None if it accepted the last bytes.
        self.blocked_since: float | None = None

    @property
    def has_unsent_bytes(self) -> bool:
        return bool(self._unsent)

    def add(self, frames: Iterable[bytes | bytearray | memoryview]) -> None:
        self._unsent += map(memoryview, frames)

    def write(self, deadline: Deadline) -> bool:
        """Write the bytes that the socket accepts now. Returns False if the deadline passes first. Raises ``OSError``."""
        first_unsent_part = self._unsent[0]
        try:
            with self._lock:
                sent_bytes = self._sock.send(first_unsent_part)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as e:
            if self.blocked_since is None:
                self.blocked_since = time.monotonic()
            event = select.POLLIN if isinstance(e, ssl.SSLWantReadError) else select.POLLOUT
            return bool(_wait(self._sock, event, min(TICK_S, deadline.remaining()))) or not deadline.expired
        self.blocked_since = None
        if sent_bytes == len(first_unsent_part):
            self._unsent.popleft()
        else:
            self._unsent[0] = first_unsent_part[sent_bytes:]
        return True

    def wait(self, timeout_s: float) -> tuple[bool, bool]:
        """Wait until bytes can be read, or blocked bytes can be written. Returns whether bytes can be read, and whether bytes
        can be written.
        """
        if self._has_pending_data():
            return True, False
        is_blocked = self.blocked_since is not None
        ready_bits = _wait(self._sock, select.POLLIN | (select.POLLOUT if is_blocked else 0), timeout_s)
        return bool(ready_bits & ~select.POLLOUT), is_blocked and bool(ready_bits & select.POLLOUT)

    def _has_pending_data(self) -> bool:
        if not isinstance(self._sock, ssl.SSLSocket):
            return False
        with self._lock:
            return self._sock.pending() > 0

    def receive(self, view: memoryview) -> int:
        """Return the number of bytes read, 0 at the end of the stream, -1 if no bytes have arrived yet. Raises ``OSError``."""
        try:
            with self._lock:
                return self._sock.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -1
        except ssl.SSLZeroReturnError:
            return 0

    def drop_unsent(self) -> None:
        """Make the operating system drop unsent bytes at the close. Raises ``OSError`` as ``shutdown`` does."""
        _drop_unsent(self._sock)

    def shutdown(self) -> None:
        """Wake the thread that waits for bytes. Raises ``OSError`` if the socket was closed already."""
        # Not SSLSocket.shutdown, which first switches back to plain text.
        socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._sock.close()


def _wait(sock: socket.socket, events: int, timeout_s: float) -> int:
    """Wait for ``events``. Returns the bits of ``poll`` that are ready, 0 after ``timeout_s``."""
    poller = select.poll()
    try:
        poller.register(sock, events)
    except ValueError:  # another thread closed it
        return select.POLLHUP
    return sum(bits for _, bits in poller.poll(max(0.0, timeout_s) * 1000))
