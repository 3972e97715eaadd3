"""Identifiers of messages: offset message ids, ids that the sender makes, and handles to recall timer messages.

All identifiers are strings with a fixed layout. Brokers do not parse most of the identifiers, but Java tools do, so the layouts
are those of Java. Time and randomness come from the caller.
"""

from __future__ import annotations

import base64
import binascii
import functools
import ipaddress
import itertools
import os
import random
import struct
from dataclasses import dataclass
from datetime import datetime

from rocketmq_spark.errors import LocalProtocolError

_PORT_AND_OFFSET = struct.Struct(">iq")  # port, commit log offset
_UNIQ_KEY_TAIL = struct.Struct(">HIIH")  # process id, class loader, ms since the month began, counter
_IP_BYTES = (4, 16)
_COUNTER_BITS = 16
_HANDLE_VERSION = "v1"


@functools.lru_cache(4096)  # cached, because messages come from few hosts
def host_text(address: bytes, port: int) -> str:
    """``host:port`` of raw address bytes, with brackets round an IPv6 address."""
    if len(address) == _IP_BYTES[0]:
        return f"{address[0]}.{address[1]}.{address[2]}.{address[3]}:{port}"
    return f"[{ipaddress.IPv6Address(address)}]:{port}"


def offset_msg_id(address: bytes, port: int, offset: int) -> str:
    """The text of an ``OffsetMessageId``, without creating the object."""
    return (address + _PORT_AND_OFFSET.pack(port, offset)).hex().upper()


@dataclass(frozen=True, slots=True)
class OffsetMessageId:
    """Where a message is stored: the broker's address and the position in its commit log."""

    address: bytes
    port: int
    offset: int

    def __str__(self) -> str:
        return offset_msg_id(self.address, self.port, self.offset)

    @property
    def host(self) -> str:
        return host_text(self.address, self.port)

    @classmethod
    def parse(cls, text: str) -> OffsetMessageId:
        """Parses 32 hexadecimal digits, or 56 if the broker has an IPv6 address."""
        data = _unhex(text, "an offset message id", _PORT_AND_OFFSET.size)
        port, offset = _PORT_AND_OFFSET.unpack(data[-_PORT_AND_OFFSET.size :])
        return cls(data[: -_PORT_AND_OFFSET.size], port, offset)


@dataclass(frozen=True, slots=True)
class UniqKey:
    """The parts of a message id that a client made."""

    address: bytes
    pid: int
    loader: int
    month_ms: int
    counter: int

    def __str__(self) -> str:
        return (self.address + _UNIQ_KEY_TAIL.pack(self.pid, self.loader, self.month_ms, self.counter)).hex().upper()

    @classmethod
    def parse(cls, text: str) -> UniqKey:
        data = _unhex(text, "a UNIQ_KEY", _UNIQ_KEY_TAIL.size)
        return cls(data[: -_UNIQ_KEY_TAIL.size], *_UNIQ_KEY_TAIL.unpack(data[-_UNIQ_KEY_TAIL.size :]))


# The process id, the text that ids begin with, the random number to which the counter's overflow is added, and the counter.
_IdSource = tuple[int, str, int, "itertools.count[int]"]


class UniqKeys:
    """Makes ids that are unique across processes and times. One instance serves a process and its forks.

    Java's counter repeats after 65 536 ids, which a batch writer makes within one millisecond. Java fills four bytes of an id
    with the hash of a class loader. This class fills them with a random number plus the overflow of its counter.
    """

    def __init__(self, rng: random.Random | None = None, address: bytes | None = None) -> None:
        self._rng = rng or random.SystemRandom()
        self._fixed_address = address
        self._month_bounds = (0, 0)
        self._last_time_text = (0, "")
        self._source = self._new_source()

    def _new_source(self) -> _IdSource:
        pid = os.getpid()
        address = self._fixed_address or self._rng.randbytes(_IP_BYTES[0])
        prefix = (address + struct.pack(">H", pid & 0xFFFF)).hex().upper()
        return pid, prefix, self._rng.getrandbits(32), itertools.count(self._rng.getrandbits(_COUNTER_BITS))

    def next(self, now_ms: int) -> str:
        """One id. Safe to call from several threads."""
        _, prefix, loader, counter = self._own_source()
        last_ms, last_text = self._last_time_text
        return _uniq_key(prefix, loader, last_text if last_ms == now_ms else self._time_text(now_ms), next(counter))

    def next_many(self, count: int, now_ms: int) -> list[str]:
        """``count`` ids that contain the same time."""
        _, prefix, loader, counter = self._own_source()
        time_text = self._time_text(now_ms)
        return [_uniq_key(prefix, loader, time_text, number) for number in itertools.islice(counter, count)]

    def _own_source(self) -> _IdSource:
        if os.getpid() != self._source[0]:  # a forked child would repeat its parent's ids
            self._source = self._new_source()
        return self._source

    def _time_text(self, now_ms: int) -> str:
        """The time as an id contains it."""
        begin_ms, end_ms = self._month_bounds
        if not begin_ms <= now_ms < end_ms:
            self._month_bounds = begin_ms, end_ms = month_bounds(now_ms)
        text = f"{(now_ms - begin_ms) & 0xFFFFFFFF:08X}"
        self._last_time_text = now_ms, text
        return text


def _uniq_key(prefix: str, loader: int, time_text: str, number: int) -> str:
    return f"{prefix}{(loader + (number >> _COUNTER_BITS)) & 0xFFFFFFFF:08X}{time_text}{number & 0xFFFF:04X}"


def month_bounds(now_ms: int) -> tuple[int, int]:
    """Start and end of the local calendar month that contains a time, in ms. Ids contain the time since the start, as
    in Java.
    """
    begin = datetime.fromtimestamp(now_ms / 1000).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end_year, end_month_index = divmod(begin.year * 12 + begin.month, 12)
    end = begin.replace(year=end_year, month=end_month_index + 1)
    return int(begin.timestamp() * 1000), int(end.timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """Identifies a timer message for a recall before it is due. The request must go to the broker in the handle."""

    topic: str
    broker_name: str
    deliver_ms: int
    message_id: str

    def __str__(self) -> str:
        return encode_handle(_HANDLE_VERSION, self.topic, self.broker_name, self.deliver_ms, self.message_id)

    @classmethod
    def parse(cls, text: str) -> RecallHandle:
        try:
            version, topic, broker_name, deliver_ms, message_id = decode_handle(text)
            if version != _HANDLE_VERSION:
                raise ValueError(f"unknown version {version}")
            return cls(topic, broker_name, int(deliver_ms), message_id)
        except ValueError as exc:
            raise LocalProtocolError(f"{text!r} is not a recall handle: {exc}") from exc


def encode_handle(*parts: str | int) -> str:
    return base64.urlsafe_b64encode(" ".join(map(str, parts)).encode()).decode()


def decode_handle(text: str) -> list[str]:
    """The parts of a handle's text. Raises ``ValueError`` for other texts."""
    return base64.b64decode(text.encode(), b"-_", validate=True).decode().split(" ")


def _unhex(text: str, id_name: str, tail_bytes: int) -> bytes:
    try:
        data = binascii.unhexlify(text)
    except ValueError:
        data = b""
    if len(data) - tail_bytes not in _IP_BYTES:
        raise LocalProtocolError(f"{text!r} is not {id_name}: it must have 32 or 56 hexadecimal digits")
    return data
