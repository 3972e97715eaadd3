"""Parses the texts of options. Each function raises only ``ValueError``, whose text says what was expected.

Spark passes texts, and Python calls pass values. ``text`` converts the values, so that both are parsed in the same way.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rocketmq_spark.base.secret import Secret
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options.names import CALLABLES_VARIABLE, code_allowed

EARLIEST = -2
LATEST = -1

# The number of a queue. Leading zeros are not allowed, because otherwise an option could name the same queue twice.
QUEUE_ID = re.compile("0|[1-9][0-9]{0,9}")
_HTTP_PREFIX = re.compile("^http://", re.IGNORECASE)
_HOST = re.compile(r"[^\s:/\\\[\]@?#%]+")
_NAMESPACE = re.compile("[%|a-zA-Z0-9_-]+")
_INSTANCE = re.compile(r"(MQ_INST_(\w+))\.", re.ASCII)
# This pattern is stricter than ``int``, which accepts 1_000 and digits of any script.
_INTEGER = re.compile("[+-]?[0-9]{1,100}")
_DURATION = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(ms|s|m|h|d)?")
_SECONDS_BY_UNIT = {None: 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZE = re.compile(r"([0-9]{1,30})\s*([kmg]?)b?", re.IGNORECASE | re.ASCII)
_BYTES_BY_UNIT = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def text(value: object) -> str:
    """Return the option text of a Python value: booleans in lower case, containers as JSON, everything else by ``str``."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("a str, not bytes")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
        try:
            return json.dumps(value)
        except TypeError as e:
            raise ValueError(f"values that JSON can contain ({e})") from e
    return str(value)


def merged_table_options(options: Mapping[str, object]) -> Mapping[str, object]:
    """Merge the options of a table in Spark's catalog, which are stored as ``option.name``; options of ``WITH`` override them."""
    table_options = {name[7:]: value for name, value in options.items() if name.startswith("option.")}
    with_options = {name: value for name, value in options.items() if not name.startswith("option.")}
    lower_with_names = {name.lower() for name in with_options}
    return {
        **{name: value for name, value in table_options.items() if name.lower() not in lower_with_names},
        **with_options,
    }


def string(value: str) -> str:
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value.strip()


def namespace(value: str) -> str | None:
    """A namespace of the characters that names of topics and groups have, or None for an empty text."""
    if not (name := value.strip()):
        return None
    if not _NAMESPACE.fullmatch(name):
        raise ValueError("letters of ASCII, digits, and the characters %|_-")
    return name


def secret(value: str) -> Secret:
    return Secret(value)


def boolean(value: str) -> bool:
    lower_text = value.strip().lower()
    if lower_text not in ("true", "false"):
        raise ValueError("true or false")
    return lower_text == "true"


def whole_number(value: str) -> int | None:
    """Return the integer that a text consists of; None for other texts."""
    stripped = value.strip()
    return int(stripped) if _INTEGER.fullmatch(stripped) else None


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse(value: str) -> int:
        number = whole_number(value)
        if number is None or number < low or (high is not None and number > high):
            raise ValueError(expected)
        return number

    return parse


def duration(value: str) -> float:
    """Seconds from ``500ms``, ``3s``, ``5m``, ``1h`` or plain milliseconds."""
    match = _DURATION.fullmatch(value.strip())
    if not match:
        raise ValueError("a duration such as 500ms, 3s, 5m, or plain milliseconds")
    return float(match[1]) * _SECONDS_BY_UNIT[match[2]]


def positive_duration(value: str) -> float:
    seconds = duration(value)
    if seconds <= 0:
        raise ValueError("a duration above zero, such as 500ms, 3s, 5m, or plain milliseconds")
    return seconds


def durations_ms(value: str) -> tuple[int, ...]:
    """Durations separated by commas, as milliseconds."""
    return tuple(round(1000 * duration(item)) for item in value.strip("[] ").split(",") if item.strip())


def fault_preset(value: str) -> str:
    """``true``, ``false``, or the name of a preset; returns the name, empty for ``false``."""
    preset_by_text = {"true": "current", "false": "", "current": "current", "4.x": "4.x"}
    try:
        return preset_by_text[value.strip().lower()]
    except KeyError:
        raise ValueError("true, false, current or 4.x") from None


def size(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """Bytes from ``256k``, ``4m`` or plain bytes, within bounds."""
    bounds = f" from {low} to {high} bytes" if high is not None else f" of at least {low} bytes" if low > 1 else ""

    def parse(value: str) -> int:
        match = _SIZE.fullmatch(value.strip())
        count = int(match[1]) * _BYTES_BY_UNIT[match[2].lower()] if match else -1
        if count < low or (high is not None and count > high):
            raise ValueError(f"a size such as 256k, 4m, or plain bytes{bounds}")
        return count

    return parse


def choice(*names: str) -> Callable[[str], str]:
    """One of ``names``, case-insensitive; returns the name as listed."""
    name_by_lower_name = {name.lower(): name for name in names}

    def parse(value: str) -> str:
        try:
            return name_by_lower_name[value.strip().lower()]
        except KeyError:
            raise ValueError("one of " + ", ".join(names)) from None

    return parse


def names(value: str) -> tuple[str, ...]:
    """Names from comma-separated text or a JSON array, in order, without duplicates."""
    is_json = value.lstrip()[:1] == "["
    parts = _json(value, list, "names separated by commas, or a JSON array of texts") if is_json else value.split(",")
    if not all(isinstance(item, str) for item in parts):
        raise ValueError("names separated by commas, or a JSON array of texts")
    items = tuple(dict.fromkeys(item.strip() for item in parts if item.strip()))
    if not items:
        raise ValueError("at least one name; several separated by commas, or as a JSON array")
    return items


def split_address(item: str, lowest_port: int = 1) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[IPv6]:port``; the host keeps its brackets. Raises ``ValueError``."""
    scheme, separator, _ = item.partition("://")
    if separator:
        tls_hint = ", and set tls=true" if scheme.lower() == "https" else ""
        raise ValueError(f"{item!r} has a scheme: remove {scheme}://{tls_hint}")
    if "/" in item:
        raise ValueError(f"{item!r} has a path: remove the path, because the client fetches no list of servers by HTTP")
    host, _, port = item.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and lowest_port <= int(port) < 65536
    if not host or not is_port:
        raise ValueError(f"{item!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ValueError(f"{item!r} is not host:port: {host[1:-1]!r} is not an IPv6 address") from None
    elif ":" in host:
        raise ValueError(f"{item!r} is not host:port: an IPv6 address needs brackets, such as [::1]:9876")
    elif not _HOST.fullmatch(host):
        raise ValueError(f"{item!r} is not host:port: {host!r} is not a host name")
    return host, int(port)


# Clusters have a handful of name servers or endpoints. Each address may cost a connection.
_MAX_SERVERS = 100


def addresses(value: str) -> tuple[str, ...]:
    """``host:port`` items separated by ``;`` or ``,``.

    Hosted clusters show addresses with ``http://``. As in the Java client, this prefix is removed, because no connection uses
    HTTP.
    """
    expected = "host:port, several separated by ; or ,"
    items = tuple(dict.fromkeys(_HTTP_PREFIX.sub("", item.strip()) for item in re.split("[;,]", value) if item.strip()))
    if not items:
        raise ValueError(expected)
    if len(items) > _MAX_SERVERS:
        raise ValueError(f"at most {_MAX_SERVERS} addresses (these are {len(items)})")
    for item in items:
        try:
            split_address(item)
        except ValueError as e:
            raise ValueError(f"{expected} ({e})") from None
    return items


def name_servers(value: str) -> tuple[str, ...]:
    """Parse addresses as ``addresses`` does. All name servers of a hosted cluster must belong to one instance."""
    items = addresses(value)
    if len(instances := {instance_of((item,)) or "no instance" for item in items}) > 1:
        raise ValueError(f"name servers of one instance (these belong to {', '.join(sorted(instances))})")
    return items


def instance_of(servers: Sequence[str]) -> str | None:
    """Return the instance in the address of a hosted cluster: ``MQ_INST_a_b`` in ``MQ_INST_a_b.host:port``; None for other
    addresses.

    The instance in the address is used as the namespace. Mirrors ``NameServerAddressUtils``.
    """
    match = _INSTANCE.match(servers[0]) if servers else None
    return match[1] if match is not None and "_" in match[2][1:-1] else None


# With this value of option 'addressMap', the client connects to the name server that reported an address, not to the address.
AT_NAME_SERVER = "nameServer"


def address_map(value: str) -> dict[str, str] | str:
    if value.strip().lower() == AT_NAME_SERVER.lower():
        return AT_NAME_SERVER
    expected = f'{AT_NAME_SERVER!r}, or JSON such as {{"10.0.0.5:10911": "localhost:10911"}}'
    addresses: dict[str, str] = _json(value, dict, expected)
    for item in (*addresses.keys(), *addresses.values()):
        if not isinstance(item, str):
            raise ValueError(f"{expected} ({item!r} is not host:port)")
        try:
            split_address(item)
        except ValueError as e:
            raise ValueError(f"{expected} ({e})") from None
    return addresses


def regex(value: str) -> str:
    if not value.strip():
        raise ValueError("a regular expression that is not empty")
    if not code_allowed():  # Python may need minutes to compile a long expression, so only RE2 compiles it
        if (problem := re2_problem(value)) is not None:
            raise ValueError(problem)
        return value
    try:
        re.compile(value)
    except re.error as e:
        raise ValueError(f"a regular expression ({e})") from None
    return value


MAX_PATTERN_CHARACTERS, MAX_REPEATS = 4096, 1000
_REPEAT = re.compile(r"\{\d{1,4096}(?:,\d{0,4096})?\}")


def re2_problem(pattern: str) -> str | None:
    """Return what was expected, as a text for an error, if RE2 could need very much memory or time to compile an expression.
    Returns None for other expressions.

    RE2 expands repeats before it applies its memory limit, and takes quadratic time for repeats that it merges.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        return (
            f"at most {MAX_PATTERN_CHARACTERS} characters, because variable {CALLABLES_VARIABLE} forbids code; "
            f"it has {len(pattern)}"
        )
    repeat_count = sum(int(number) for braces in _REPEAT.findall(pattern) for number in re.findall(r"\d+", braces)[-1:])
    if repeat_count > MAX_REPEATS:
        return (
            f"at most {MAX_REPEATS} repeats in all braces together, because variable {CALLABLES_VARIABLE} forbids code"
        )
    return None


def assignment(value: str) -> tuple[MessageQueue, ...]:
    """``{"t":{"broker-a":[0,1]}}`` as sorted queues."""
    expected = 'JSON such as {"orders":{"broker-a":[0,1]}}'
    queues = []
    for topic, ids_by_broker in _json(value, dict, expected).items():
        for broker, ids in _entries_by_broker(ids_by_broker, expected).items():
            if not isinstance(ids, list) or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
                raise ValueError(expected)
            queues += [MessageQueue(topic, broker, i) for i in ids]
    if not queues:
        raise ValueError(f"{expected} with at least one queue")
    if repeated_queues := [queue for queue, count in Counter(queues).items() if count > 1]:
        raise ValueError(f"{expected} with each queue once ({repeated_queues[0]} is named twice)")
    return tuple(sorted(queues))


def queue_numbers(example: str, low: int) -> Callable[[str], dict[MessageQueue, int]]:
    """``{"t":{"broker-a":{"0":17}}}`` as numbers by queue, each at least ``low``."""
    expected = f"JSON such as {example}"

    def parse(value: str) -> dict[MessageQueue, int]:
        numbers: dict[MessageQueue, int] = {}
        for topic, numbers_by_broker in _json(value, dict, expected).items():
            numbers |= _numbers_of_topic(topic, numbers_by_broker, expected, low)
        if not numbers:
            raise ValueError(f"{expected} with at least one queue")
        return numbers

    return parse


def _numbers_of_topic(topic: str, numbers_by_broker: object, expected: str, low: int) -> dict[MessageQueue, int]:
    numbers = {}
    for broker, number_by_queue_id in _entries_by_broker(numbers_by_broker, expected).items():
        for queue_id, number in _mapping(number_by_queue_id, expected).items():
            queue_text = f"{topic}/{broker}/{queue_id}"
            if not QUEUE_ID.fullmatch(queue_id):
                raise ValueError(f"{expected} ({queue_text}: the queue id is not a whole number)")
            if not isinstance(number, int) or isinstance(number, bool) or number < low:
                raise ValueError(f"{expected} ({queue_text}: {number!r} is not a whole number of at least {low})")
            numbers[MessageQueue(topic, broker, int(queue_id))] = number
    return numbers


_OFFSETS_EXAMPLE = '{"orders":{"broker-a":{"0":17,"1":-2}}} (-2 earliest, -1 latest)'
queue_offsets = queue_numbers(_OFFSETS_EXAMPLE, EARLIEST)

# Offsets by queue, and ``EARLIEST`` or ``LATEST`` by topic.
OffsetsByQueue = dict[MessageQueue | str, int]


def offsets(*words: str) -> Callable[[str], str | OffsetsByQueue]:
    """One of ``words``; or JSON with offsets by queue, or with ``earliest`` or ``latest`` for all queues of a topic."""
    offset_by_word = {word: offset for word, offset in (("earliest", EARLIEST), ("latest", LATEST)) if word in words}
    expected = f"JSON such as {_OFFSETS_EXAMPLE}, or with {' or '.join(offset_by_word)} for a topic"

    def parse(value: str) -> str | OffsetsByQueue:
        if value.lstrip()[:1] != "{":
            try:
                return choice(*words)(value)
            except ValueError:
                raise ValueError(f"{', '.join(words)}, or JSON such as " + '{"orders":{"broker-a":{"0":17}}}') from None
        result: OffsetsByQueue = {}
        for topic, topic_value in _json(value, dict, expected).items():
            if not isinstance(topic_value, str):
                result.update(_numbers_of_topic(topic, topic_value, expected, EARLIEST).items())
            elif (word := topic_value.strip().lower()) in offset_by_word:
                result[topic] = offset_by_word[word]
            else:
                raise ValueError(f"{expected} ({topic}: {topic_value!r} is not allowed)")
        if not result:
            raise ValueError(f"{expected}, with at least one queue")
        return result

    return parse


def timestamp(value: str) -> int:
    """Epoch milliseconds from a number or ISO-8601 text; a text without a zone is UTC."""
    stripped = value.strip()
    number = whole_number(stripped)
    if number is not None and number >= 0:
        return number
    try:
        moment = datetime.fromisoformat(stripped)
    except ValueError:
        raise ValueError("epoch milliseconds or ISO-8601 such as 2026-01-31T12:00:00Z") from None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)


def consume_from_where(value: str) -> str | int:
    """``latest``, ``earliest``, or epoch milliseconds."""
    word = value.strip().lower()
    if word in ("latest", "earliest"):
        return word
    try:
        return timestamp(value)
    except ValueError as e:
        raise ValueError(f"latest, earliest, or {e}") from None


def callable_name(value: str) -> str:
    module, _, name = value.strip().partition(":")
    if not module or not name.isidentifier():
        raise ValueError("module:callable")
    return value.strip()


STRATEGIES = (
    "averagely",
    "averagelyByCircle",
    "consistentHash",
    "config",
    "machineRoom",
    "machineRoomNearby",
    "environment",
)


def strategy(value: str) -> str:
    if ":" in value:
        return callable_name(value)
    try:
        return choice(*STRATEGIES)(value)
    except ValueError as e:
        raise ValueError(f"{e}, or module:callable") from None


SELECTORS = ("roundRobin", "random", "hash", "machineRoom", "environment", "column")


def selector(value: str) -> str:
    if ":" in value:
        return callable_name(value)
    try:
        return choice(*SELECTORS)(value)
    except ValueError as e:
        raise ValueError(f"{e}, or module:callable") from None


def auto_integer(high: int) -> Callable[[str], int | None]:
    """A whole number from 1 to ``high``, or None for ``auto``."""
    parse_number = integer(1, high)

    def parse(value: str) -> int | None:
        if value.strip().lower() == "auto":
            return None
        try:
            return parse_number(value)
        except ValueError as e:
            raise ValueError(f"auto, or {e}") from None

    return parse


def names_with_repeats(value: str) -> tuple[str, ...]:
    """Names from comma-separated text or a JSON array, in order; a name may occur several times."""
    is_json = value.lstrip()[:1] == "["
    parts = _json(value, list, "names separated by commas, or a JSON array of texts") if is_json else value.split(",")
    if not all(isinstance(item, str) and item.strip() for item in parts):
        raise ValueError("names separated by commas, or a JSON array of texts")
    return tuple(item.strip() for item in parts)


PROPERTY_TYPES = ("string", "boolean", "int", "bigint", "float", "double", "date", "timestamp", "binary")


def property_columns(value: str) -> tuple[tuple[str, str], ...]:
    """``name:type`` items separated by commas, or a JSON object; a name without a type is a string."""
    expected = f"items such as amount:bigint, region:string (types: {', '.join(PROPERTY_TYPES)})"
    if value.lstrip()[:1] == "{":
        items = [(str(k), str(v)) for k, v in _json(value, dict, expected).items()]
    else:
        parts = (item.strip().rpartition(":") for item in value.split(",") if item.strip())
        items = [(name or kind, kind if name else "string") for name, _, kind in parts]
    columns = tuple(
        (name.strip(), {"long": "bigint", "integer": "int"}.get(k := kind.strip().lower(), k)) for name, kind in items
    )
    if not columns or any(not name or kind not in PROPERTY_TYPES for name, kind in columns):
        raise ValueError(expected)
    if len({name for name, _ in columns}) < len(columns):
        raise ValueError(f"{expected}, each name once")
    return columns


def topic_filters(value: str) -> str | dict[str, str]:
    """One filter for all topics, or JSON ``{"topic": "filter"}``."""
    if value.lstrip()[:1] != "{":
        return string(value)
    filters = _json(value, dict, 'a filter, or JSON such as {"orders": "vip || new"}')
    if not filters or any(
        not isinstance(filter_text, str) or not filter_text.strip() for filter_text in filters.values()
    ):
        raise ValueError('a filter, or JSON such as {"orders": "vip || new"}')
    return {topic: filter_text.strip() for topic, filter_text in filters.items()}


def json_object(example: str) -> Callable[[str], dict[str, Any]]:
    def parse(value: str) -> dict[str, Any]:
        return dict(_json(value, dict, f"JSON such as {example}"))

    return parse


def json_document(value: str) -> Any:
    """Parse JSON. It is an error if a name occurs twice in an object, because ``json`` would silently use the last value."""
    try:
        return json.loads(value, object_pairs_hook=_unique_names)
    except RecursionError as e:
        raise ValueError("JSON that is nested too deeply") from e


def _unique_names(items: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(items)
    if len(document) < len(items):
        repeated_name = next(name for name, count in Counter(name for name, _ in items).items() if count > 1)
        raise ValueError(f"{repeated_name!r} is named twice")
    return document


def _json(value: str, kind: type, expected: str) -> Any:
    try:
        document = json_document(value)
    except ValueError as e:
        raise ValueError(f"{expected} ({e})") from None
    if not isinstance(document, kind):
        raise ValueError(expected)
    return document


def _entries_by_broker(value: object, expected: str) -> dict[str, Any]:
    """Return a topic's JSON object, whose keys are names of brokers. If the JSON has Kafka's form, the error says why partition
    numbers do not suffice.
    """
    has_partition_numbers = isinstance(value, dict) and any(
        name.isdecimal() and isinstance(offset, int) for name, offset in value.items()
    )
    if has_partition_numbers or isinstance(value, list):
        raise ValueError(f"{expected}: each queue is of a broker, so its number alone is not enough")
    return _mapping(value, expected)


def _mapping(value: object, expected: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(expected)
    return value
