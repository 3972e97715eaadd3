"""RocketMQ's own Java client as an independent writer and reader.

The class path is that of the local broker, whose jars hold the client; lz4 and zstd come from PySpark's jars. The
compiler is Janino, which PySpark brings along too: a JRE is enough, and it is faster than javac. It knows no lambdas
and infers no type arguments. One JVM per call. ``java_peer`` in tests/fix_broker.py is a fixture for it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark

from rocketmq_spark.localbroker import distro
from rocketmq_spark.localbroker.archive import Archive
from rocketmq_spark.localbroker.java import find_java

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
    """Send ``count`` messages, their kinds in turn, queue after queue; what the broker acknowledged.

    ``batch`` is how many travel in one request. ``run`` marks bodies and the property of that name.
    """
    options = {"nameServer": name_server, "topic": topic, "count": count, "size": size, "kinds": ",".join(kinds),
               "batch": batch, "first": first, "run": run or uuid.uuid4().hex[:8]}  # fmt: skip
    return list(_records("Send", options))


def java_send_to(name_server: str, topic: str, queues: Iterable[int], count: int, run: str) -> list[Record]:
    """The same to the queues with these ids alone."""
    return list(
        _records("Send", {"nameServer": name_server, "topic": topic, "queues": ",".join(map(str, queues)), "count": count,
                          "size": 100, "kinds": "plain", "batch": 1, "first": 0, "run": run})
    )  # fmt: skip


def java_read(name_server: str, topic: str, count: int = 0, bodies: bool = False) -> list[Record]:
    """Everything that the topic (or several: ``a,b``) holds now; ``count`` are waited for while some come within 20 s."""
    options = {"nameServer": name_server, "topic": topic, "count": count, "bodies": str(bodies).lower()}
    return list(_records("Read", options))


@dataclass(frozen=True, slots=True)
class JavaPeer:
    """The Java client, pointed at one name server, for single questions."""

    name_server: str

    def hash_queues(self, topic: str, keys: Iterable[str]) -> list[int]:
        """Sends a message per key with ``SelectMessageQueueByHash``; the queue ids that were chosen."""
        return [answer["queue"] for answer in self._ask("hash", json.dumps(list(keys)), topic=topic)]

    def read(self, topic: str, count: int) -> list[Record]:
        """All messages of a topic with their bodies, once there are so many."""
        return java_read(self.name_server, topic, count, bodies=True)

    def query(self, topic: str, key: str) -> list[str]:
        """Ids of the messages that the broker's index finds for ``key``."""
        return [answer["id"] for answer in self._ask("query", topic=topic, key=key)]

    def producers(self, broker_address: str, group: str) -> list[str]:
        """Client id and language of each producer of ``group`` that the broker knows."""
        return [answer["client"] for answer in self._ask("producers", broker=broker_address, group=group)]

    def _ask(self, what: str, given: str = "", **options: str) -> list[dict[str, Any]]:
        printed = run_java("Peer", {"what": what, "nameServer": self.name_server, **options}, given=given)
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def _records(main_class: str, options: Mapping[str, object]) -> Iterator[Record]:
    for line in run_java(main_class, options).splitlines():
        if line.startswith("{"):
            yield Record(**json.loads(line))


def run_java(main_class: str, options: Mapping[str, object], timeout_s: float = 300.0, given: str = "") -> str:
    """Run one of the classes beside this file with ``name=value`` arguments; what it printed.

    ``given`` is its standard input: one line.
    """
    command = [*java_command(main_class), *(f"{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, input=given.encode(), capture_output=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{main_class} ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    return done.stdout.decode()


def java_command(main_class: str) -> list[str]:
    """What runs one of the classes; its ``name=value`` arguments come behind it."""
    classes = compiled()
    return [
        *quick_java(), "-Xmx256m", "-Dfile.encoding=UTF-8", f"-Duser.home={classes}",
        "-cp", os.pathsep.join([class_path(), str(classes)]),
        "Main", main_class,
    ]  # fmt: skip


def quick_java() -> list[str]:
    """A JVM that starts soon: with what brokers have parsed of the jars "core", if they have. A class path begins with these."""
    archive = Archive(distro.cache_folder() / "archives", find_java(), distro.fetch(["core"], quiet=True))
    parsed = archive.flags(Path()) if archive.path.exists() else []
    return [str(find_java().path), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *parsed]


def mqadmin(home: Path, command: str, *arguments: str) -> str:
    """What RocketMQ's own tool printed; ``home`` is where it writes its logs."""
    jars = os.pathsep.join(map(str, distro.fetch(["core", "tools"], quiet=True)))
    flags = [f"-Duser.home={home}", f"-Drocketmq.home.dir={home}", "-cp", jars]
    call = [*quick_java(), *flags, "org.apache.rocketmq.tools.command.MQAdminStartup", command, *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


@functools.cache
def class_path() -> str:
    return os.pathsep.join([*map(str, distro.fetch(["core"], quiet=True)), *_pyspark_jars("lz4-java", "zstd-jni")])


@functools.cache
def compiled() -> Path:
    """The folder with the compiled classes; it lives as long as this process."""
    folder = Path(_scratch().name)
    compiler = os.pathsep.join(_pyspark_jars("janino", "commons-compiler"))
    command = [
        str(find_java().path), "-XX:TieredStopAtLevel=1", "-cp", compiler,
        "org.codehaus.commons.compiler.samples.CompilerDemo",
        "-encoding", "UTF-8", "-d", str(folder), "-classpath", class_path(), *map(str, SOURCES),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not all((folder / f"{source.stem}.class").exists() for source in SOURCES):
        raise RuntimeError(f"the Java witness does not compile:\n{done.stdout}{done.stderr}")
    return folder


def _pyspark_jars(*names: str) -> list[str]:
    folder = Path(pyspark.__file__).parent / "jars"
    return [str(jar) for name in names for jar in folder.glob(f"{name}-*.jar")]


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rocketmq-witness-", ignore_cleanup_errors=True)
