"""The client and a producer where nothing is installed: no pyarrow, no numpy, no pandas, no PySpark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.base.codes import Request
from tests.mockbroker import Call, Command, MockBroker, ok, route

ROOT = Path(__file__).parents[2]
BLOCKED = """
import importlib, pkgutil, sys

ABSENT = {"pyarrow", "numpy", "pandas", "pyspark", "py4j", "xxhash"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
EVERYTHING = """
import rocketmq_spark
for room in ("wire", "remoting", "client", "producer"):
    package = importlib.import_module(f"rocketmq_spark.{room}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from rocketmq_spark import session
print(sorted(ABSENT & set(sys.modules)))
"""
SENDS = """
from rocketmq_spark import Message, Producer
with Producer(name_server=sys.argv[1], group="g", compress_above="10b") as producer:
    print(producer.send(Message("t", b"x" * 100, tags="a")).queue)
    producer.send_batch([Message("t", b"1"), Message("t", b"2")])
    futures = [producer.send_async(Message("t", b"y")) for _ in range(9)]
    print(sum(future.result().queue_offset for future in futures))
    producer.send_oneway(Message("t", b"z"))
    producer.flush()
"""
LOOKS_AT_THE_PACKAGE = """
import inspect, pydoc
import rocketmq_spark

assert "Producer" in pydoc.render_doc(rocketmq_spark)
assert dict(inspect.getmembers(rocketmq_spark))["Producer"] is rocketmq_spark.Producer
names = {}
exec("from rocketmq_spark import *", names)
listed = set(rocketmq_spark.__all__)
assert names.keys() - {"__builtins__"} == listed == {n for n in rocketmq_spark._MODULE_BY_NAME if hasattr(rocketmq_spark, n)}
print(sorted(rocketmq_spark._MODULE_BY_NAME.keys() - listed))
try:
    from rocketmq_spark import MetricsListener
except ModuleNotFoundError as e:
    print(e)
try:
    rocketmq_spark.register
except AttributeError as e:
    print(e)
"""
LZ4 = """
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.errors import LocalProtocolError
from rocketmq_spark.wire.compression import compress, decompress
for work in (lambda: compress(b"x", SysFlag.LZ4), lambda: decompress(b"x", SysFlag.ZSTD)):
    try:
        work()
    except LocalProtocolError as e:
        print(e.message)
"""


def run(script: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + script, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_module_of_the_client_can_be_imported() -> None:
    assert run(EVERYTHING) == ["[]"]


def test_help_and_star_imports_work_without_extras() -> None:
    hidden, imported, read = run(LOOKS_AT_THE_PACKAGE)
    assert hidden == str(
        [
            "GroupOffsetListener",
            "MetricsListener",
            "SentRows",
            "foreach_batch_writer",
            "read_rocketmq",
            "register",
            "write_rocketmq",
        ]
    )
    assert imported.startswith(
        "rocketmq_spark.MetricsListener needs packages that are not installed: pyspark. Install them: pip install"
    )
    assert read.startswith("rocketmq_spark.register needs packages that are not installed: pyspark")


@pytest.fixture
def server() -> MockBroker:
    def answer(call: Call) -> Command:
        return ok(msgId="x", queueId="0", queueOffset="1")

    return MockBroker(
        {
            Request.SEND_MESSAGE_V2: answer,
            Request.SEND_BATCH_MESSAGE: answer,
            Request.HEART_BEAT: ok(),
            Request.UNREGISTER_CLIENT: ok(),
        }
    )


def test_a_producer_sends(server: MockBroker) -> None:
    with server as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        assert run(SENDS, broker.address) == ["t/broker-a/0", "9"]
        broker.wait_for(lambda: len(broker.seen(Request.SEND_MESSAGE_V2)) == 11)
        first = broker.seen(Request.SEND_MESSAGE_V2)[0]
        assert len(first.body) < 100, "compressed"
        assert len(broker.seen(Request.SEND_BATCH_MESSAGE)) == 1


def test_codecs_that_are_not_there_are_named() -> None:
    assert run(LZ4) == [f"{name} needs the codecs of pyarrow, which is not installed" for name in ("lz4", "zstd")]


def test_a_consumer_loads_numpy_when_it_has_a_backlog_only() -> None:
    """Which takes 13 MiB."""
    made = "import sys\nfrom rocketmq_spark import Consumer\nConsumer(name_server='127.0.0.1:1', group='g')\n"
    done = subprocess.run(
        [sys.executable, "-c", made + "print({'numpy', 'pyarrow'} & set(sys.modules))"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"
