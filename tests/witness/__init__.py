"""RocketMQ's own Java client as an independent writer and reader.

The class path is that of the local broker, whose jars hold the client; lz4 and zstd come from PySpark's jars. The
compiler is Janino, which PySpark brings along too: a JRE is enough, and it is faster than javac. It knows no lambdas
and infers no type arguments. What it compiled stays in the virtual environment. One JVM serves the calls of this process, a
second one those that come while it is busy; members of a group are processes of their own (``java_command``).
``java_peer`` in tests/fix_broker.py is a fixture for it.
"""

from __future__ import annotations

import atexit
import base64
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyspark

from rocketmq_spark.localbroker import distribution
from rocketmq_spark.localbroker.java import Archive, find_java
from tests.helpers import indexed

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.java")))
# What a message may be: see ``message`` and ``body`` in Send.java. The compressed ones are never sent in batches.
KINDS = ("plain", "bare", "emptytag", "unicode", "big", "zlib", "lz4", "zstd")

# Properties that RocketMQ adds by itself.
_OWN = {"UNIQ_KEY", "WAIT", "CLUSTER", "MSG_REGION", "TRACE_ON", "MIN_OFFSET", "MAX_OFFSET", "TAGS", "KEYS"}


@dataclass(frozen=True, slots=True)
class Record:
    """A message as the Java client sent or saw it; ``md5`` is of the body, ``index`` and ``kind`` only of sent ones.

    ``born``, ``stored`` and ``seen`` are the milliseconds at which it was sent, stored in its topic and read.
    """

    id: str
    broker: str
    queue: int
    offset: int
    size: int
    md5: str
    properties: Mapping[str, str]
    index: int = -1
    kind: str = ""
    born: int = 0
    stored: int = 0
    seen: int = 0
    flag: int = 0
    text: str = ""
    topic: str = ""

    @property
    def body(self) -> bytes:
        """Of messages that were read with ``bodies``."""
        return base64.b64decode(self.text)

    @property
    def place(self) -> tuple[str, int, int]:
        return self.broker, self.queue, self.offset

    @property
    def tags(self) -> str | None:
        return self.properties.get("TAGS") or None

    @property
    def keys(self) -> list[str] | None:
        text = self.properties.get("KEYS")
        return text.split(" ") if text else None

    @property
    def user_properties(self) -> dict[str, str]:
        return {name: value for name, value in self.properties.items() if name not in _OWN}

    @property
    def content(self) -> tuple[object, ...]:
        """Everything that the sender decided, for comparison with ``content`` of a row."""
        return content(self.md5, self.tags, self.keys, self.user_properties)


def content(
    md5: str, tags: str | None, keys: Sequence[str] | None, properties: Mapping[str, str] | None
) -> tuple[object, ...]:
    """What makes two messages equal; absent and empty are the same."""
    return md5, tags or None, tuple(keys or ()), tuple(sorted((properties or {}).items()))


def md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


def java_send(
    name_server: str,
    topic: str,
    count: int,
    *,
    size: int = 100,
    kinds: Iterable[str] = ("plain",),
    batch: int = 1,
    first: int = 0,
    run: str | None = None,
) -> list[Record]:
    """Send ``count`` messages, their kinds in turn, queue after queue; what the broker acknowledged, once it is in its queues.

    ``batch`` is how many travel in one request. ``run`` marks bodies and the property of that name.
    """
    options = {"nameServer": name_server, "topic": topic, "count": count, "size": size, "kinds": ",".join(kinds),
               "batch": batch, "first": first, "run": run or uuid.uuid4().hex[:8]}  # fmt: skip
    return _sent(name_server, options)


def java_send_to(name_server: str, topic: str, queues: Iterable[int], count: int, run: str) -> list[Record]:
    """The same to the queues with these ids alone."""
    options = {"nameServer": name_server, "topic": topic, "queues": ",".join(map(str, queues)), "count": count,
               "size": 100, "kinds": "plain", "batch": 1, "first": 0, "run": run}  # fmt: skip
    return _sent(name_server, options)


def _sent(name_server: str, options: dict[str, object]) -> list[Record]:
    records = list(_records("Send", options))
    indexed(name_server)
    return records


def java_read(name_server: str, topic: str, count: int = 0, bodies: bool = False) -> list[Record]:
    """Everything that was acknowledged for the topic (or several: ``a,b``). ``count`` are waited for while some come within
    20 s, and fewer are an error.
    """
    indexed(name_server)
    options = {"nameServer": name_server, "topic": topic, "count": count, "bodies": str(bodies).lower()}
    return list(_records("Read", options))


@dataclass(frozen=True, slots=True)
class JavaPeer:
    """The Java client, pointed at one name server, for single questions."""

    name_server: str

    def hash_queues(self, topic: str, keys: Iterable[str]) -> list[int]:
        """Sends a message per key with ``SelectMessageQueueByHash``; the queue ids that were chosen."""
        return [answer["queue"] for answer in self._ask("hash", topic=topic, keys=json.dumps(list(keys)))]

    def read(self, topic: str, count: int) -> list[Record]:
        """All messages of a topic with their bodies, once there are so many."""
        return java_read(self.name_server, topic, count, bodies=True)

    def query(self, topic: str, key: str) -> list[str]:
        """Ids of the messages that the broker's index finds for ``key``."""
        return [answer["id"] for answer in self._ask("query", topic=topic, key=key)]

    def producers(self, broker_address: str, group: str) -> list[str]:
        """Client id and language of each producer of ``group`` that the broker knows."""
        return [answer["client"] for answer in self._ask("producers", broker=broker_address, group=group)]

    def request(self, topic: str, count: int) -> list[str]:
        """The replies to requests 0, 1, and so on: their bodies, and who they say they are by."""
        return [answer["reply"] for answer in self._ask("request", topic=topic, count=str(count))]

    def _ask(self, what: str, **options: str) -> list[dict[str, Any]]:
        printed = run_java("Peer", {"what": what, "nameServer": self.name_server, **options})
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def _records(main_class: str, options: Mapping[str, object]) -> Iterator[Record]:
    for line in run_java(main_class, options).splitlines():
        if line.startswith("{"):
            yield Record(**json.loads(line))


def run_java(name: str, options: Mapping[str, object], timeout_s: float = 300.0) -> str:
    """Call ``run`` of one of the classes beside this file with these options; what it printed."""
    jvm = _idle.pop() if _idle else _Jvm()
    printed = jvm.call(name, {key: str(value) for key, value in options.items()}, timeout_s)
    _idle.append(jvm)
    if printed.failure is not None:
        raise RuntimeError(f"{name} failed:\n{printed.failure[-3000:]}")
    return printed.out


def mqadmin(command: str, *arguments: str) -> str:
    """What RocketMQ's own tool printed."""
    return run_java("Tool", {"arguments": json.dumps([command, *arguments])}, timeout_s=120)


class _Printed(NamedTuple):
    out: str
    failure: str | None


class _Jvm:
    """A JVM that serves one call after the other, until this process ends."""

    def __init__(self) -> None:
        self._errors = Path(_scratch().name, f"errors-{uuid.uuid4().hex[:8]}")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                _java("Main"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
            )
        atexit.register(self._end)

    def call(self, name: str, options: Mapping[str, str], timeout_s: float) -> _Printed:
        given, printed = self._process.stdin, self._process.stdout
        assert given is not None
        assert printed is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            given.write(json.dumps({"call": name, "options": options}) + "\n")
            given.flush()
            lines: list[str] = []
            for line in iter(printed.readline, ""):
                if line.startswith("##"):
                    return _Printed("".join(lines), json.loads(line[2:]).get("failure"))
                lines.append(line)
        finally:
            timer.cancel()
        code, errors = self._process.wait(), self._errors.read_text("utf-8", "replace")
        raise RuntimeError(f"{name} did not end within {timeout_s:g} s, or its JVM died ({code}):\n{errors[-3000:]}")

    def _end(self) -> None:
        self._process.communicate()


_idle: list[_Jvm] = []


def java_command(main_class: str) -> list[str]:
    """What runs one of the classes in a JVM of its own; its ``name=value`` arguments come behind it."""
    return [*_java("Main"), main_class]


def _java(main_class: str) -> list[str]:
    home = _scratch().name
    return [
        *quick_java(), "-Xmx256m", "-Dfile.encoding=UTF-8", f"-Duser.home={home}", f"-Drocketmq.home.dir={home}",
        "-cp", os.pathsep.join([class_path(), str(compiled())]),
        main_class,
    ]  # fmt: skip


def quick_java() -> list[str]:
    """A JVM that starts soon: with what brokers have parsed of the jars "core", if they have. A class path begins with these."""
    archive = Archive(distribution.cache_folder() / "archives", find_java(), distribution.fetch(["core"], quiet=True))
    parsed = archive.flags(Path()) if archive.path.exists() else []
    return [str(find_java().path), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *parsed]


@functools.cache
def class_path() -> str:
    jars = [*distribution.fetch(["core"], quiet=True), *distribution.fetch(["tools"], quiet=True)]
    return os.pathsep.join([*map(str, jars), *_pyspark_jars("lz4-java", "zstd-jni")])


@functools.cache
def compiled() -> Path:
    """The folder with the compiled classes, which all processes share: its name says what they were compiled from."""
    made_of = b"".join(source.read_bytes() for source in SOURCES) + class_path().encode()
    folder = Path(sys.prefix, f"witness-{hashlib.sha256(made_of).hexdigest()[:12]}")
    if not folder.exists():
        part = Path(tempfile.mkdtemp(prefix="witness-", dir=sys.prefix))
        _compile(part)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return folder


def _compile(folder: Path) -> None:
    compiler = os.pathsep.join(_pyspark_jars("janino", "commons-compiler"))
    command = [
        str(find_java().path), "-XX:TieredStopAtLevel=1", "-cp", compiler,
        "org.codehaus.commons.compiler.samples.CompilerDemo",
        "-encoding", "UTF-8", "-d", str(folder), "-classpath", class_path(), *map(str, SOURCES),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not all((folder / f"{source.stem}.class").exists() for source in SOURCES):
        raise RuntimeError(f"the Java witness does not compile:\n{done.stdout}{done.stderr}")


def _pyspark_jars(*names: str) -> list[str]:
    folder = Path(pyspark.__file__).parent / "jars"
    return [str(jar) for name in names for jar in folder.glob(f"{name}-*.jar")]


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rocketmq-witness-", ignore_cleanup_errors=True)
