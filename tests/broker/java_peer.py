"""RocketMQ's own Java client as a child process, from the jars that the local broker runs on (``JavaPeer.java``)."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import LocalBroker, distro
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.wire.properties import decode_properties

SOURCE = Path(__file__).with_name("JavaPeer.java")


@dataclass(frozen=True, slots=True)
class JavaMessage:
    """A message as Java's consumer hands it to its user."""

    queue_id: int
    queue_offset: int
    msg_id: str
    flag: int
    body: bytes
    tags: str
    keys: str
    properties: dict[str, str]


class JavaPeer:
    """The Java client, pointed at one name server. ``classes`` holds the compiled program; logs go there too."""

    def __init__(self, name_server: str, classes: Path) -> None:
        self._name_server = name_server
        self._classes = classes

    def hash_queues(self, topic: str, keys: Iterable[str]) -> list[int]:
        """Sends a message per key with ``SelectMessageQueueByHash``; the queue ids that were chosen."""
        lines = "\n".join(base64.b64encode(key.encode()).decode() for key in keys)
        return [int(line) for line in self._run("hash", topic, stdin=lines)]

    def read(self, topic: str, count: int) -> list[JavaMessage]:
        """The first ``count`` messages of a topic, or fewer when none comes for 20 s."""
        return [_message(line) for line in self._run("read", topic, str(count))]

    def query(self, topic: str, key: str) -> list[str]:
        """Ids of the messages that the broker's index finds for ``key``."""
        return self._run("query", topic, key)

    def producers(self, broker_address: str, group: str) -> list[str]:
        """Client id and language of each producer of ``group`` that the broker knows."""
        return self._run("producers", broker_address, group)

    def _run(self, command: str, *arguments: str, stdin: str = "") -> list[str]:
        options = ["-XX:TieredStopAtLevel=1", f"-Duser.home={self._classes}", "-cp", f"{self._classes}:{_jars()}"]
        call = [str(find_java().path), *options, "JavaPeer", command, self._name_server, *arguments]
        done = subprocess.run(call, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]


def _jars() -> str:
    return ":".join(str(jar) for jar in distro.fetch(("core",), quiet=True))


def _message(line: str) -> JavaMessage:
    queue_id, offset, msg_id, flag, *parts = line.split(" ")
    body, tags, keys, properties = (b"" if part == "-" else base64.b64decode(part) for part in parts)
    return JavaMessage(
        int(queue_id), int(offset), msg_id, int(flag), body, tags.decode(), keys.decode(),
        dict(decode_properties(properties.decode())),
    )  # fmt: skip


@pytest.fixture(scope="session")
def java_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program. Needs a Java that comes with its compiler, as every JDK and most packaged runtimes do."""
    java, folder = str(find_java().path), tmp_path_factory.mktemp("java")
    modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=True).stdout
    assert "jdk.compiler" in modules, f"{java} has no compiler (module jdk.compiler): these tests need a JDK"
    compiler = [java, "-m", "jdk.compiler/com.sun.tools.javac.Main", "-nowarn", "-cp", _jars(), "-d", str(folder)]
    subprocess.run([*compiler, str(SOURCE)], check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture
def java_peer(rocketmq: LocalBroker, java_classes: Path) -> JavaPeer:
    return JavaPeer(rocketmq.name_server, java_classes)
