"""The Java clients as timed peers (``Bench.java``, over gRPC ``GrpcBench.java``), compiled by the Janino inside PySpark."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark

from benchmarks import harness
from rocketmq_spark.localbroker import distribution
from rocketmq_spark.localbroker.java import find_java

_TOO_LONG_S = 180.0
# Passes that do not count are made for so long: Spark's JVM is warm, too.
WARM_UP_S = 6.0

# Programs, and the jars of which each is compiled and run with; modes of the second begin with its name.
_BENCH, _GRPC = "Bench", "GrpcBench"
_JARS = {_BENCH: "core", _GRPC: "grpc-client"}


def jvm() -> list[str]:
    """The command of a JVM, but for its class path."""
    return [str(find_java().path), "-Xmx2g"]


@functools.cache
def class_path(program: str) -> str:
    return os.pathsep.join(map(str, distribution.fetch([_JARS[program]], quiet=True)))


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rocketmq-bench-", ignore_cleanup_errors=True)


@functools.cache
def compiled(program: str) -> Path:
    """The folder with its classes."""
    folder, source = Path(_scratch().name), Path(__file__).with_name(f"{program}.java")
    jars = Path(pyspark.__file__).parent / "jars"
    compiler = os.pathsep.join(
        str(jar) for name in ("janino", "commons-compiler") for jar in jars.glob(f"{name}-*.jar")
    )
    command = [
        str(find_java().path), "-XX:TieredStopAtLevel=1", "-cp", compiler,
        "org.codehaus.commons.compiler.samples.CompilerDemo",
        "-encoding", "UTF-8", "-d", str(folder), "-classpath", class_path(program), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not (folder / f"{program}.class").exists():
        raise RuntimeError(f"{source.name} does not compile:\n{done.stdout}{done.stderr}")
    return folder


def run(
    mode: str,
    address: str,
    topic: str,
    count: int,
    *arguments: int | str,
    on_begin: Callable[[], None],
    on_end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One run in a JVM of its own that has warmed up: messages, distinct messages, seconds, CPU seconds of that JVM.

    ``address`` is that of a name server, or of a Proxy. ``on_begin`` is called when the pass that counts begins, ``on_end``
    when it has ended and the JVM has yet to.
    """
    program = _GRPC if mode.startswith("grpc-") else _BENCH
    folder = compiled(program)
    command = [
        *jvm(), f"-Duser.home={folder}", f"-DwarmUpMs={1000 * WARM_UP_S:.0f}",
        "-cp", os.pathsep.join([class_path(program), str(folder)]),
        program, mode, address, topic, str(count), *map(str, arguments),
    ]  # fmt: skip
    found = None
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            watch = threading.Timer(_TOO_LONG_S, process.kill)
            watch.start()
            for line in process.stdout:
                if line == "begin\n":
                    on_begin()
                elif line.startswith("{"):
                    found = json.loads(line)
                    on_end()
            watch.cancel()
        if process.returncode or found is None:
            errors.seek(0)
            text = errors.read()[-2000:].decode("utf-8", "replace")
            raise harness.PeerFailed(f"{program} {mode} ended with {process.returncode}:\n{text}")
    return dict(found)
