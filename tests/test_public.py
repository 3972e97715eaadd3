"""What users call says what it takes: every public class and function names each of its arguments."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import rocketmq_spark
from rocketmq_spark.errors import OptionError
from tests.test_house import modules

# Which docstring describes the arguments that a method shares with another one.
_SHARED = re.compile(r"arguments\s+are\s+those\s+of\s+``(\w+)``")


def public() -> Iterator[tuple[str, object]]:
    """Every public name, and the public methods and properties of classes, those of our own base classes too."""
    for name in rocketmq_spark.__all__:
        thing = getattr(rocketmq_spark, name)
        yield name, thing
        for base in inspect.getmro(thing) if inspect.isclass(thing) else ():
            if base.__module__.startswith("rocketmq_spark"):
                members = [(m, f) for m, f in vars(base).items() if not m.startswith("_")]
                yield from ((f"{name}.{m}", f) for m, f in members if inspect.isfunction(f) or isinstance(f, property))


@pytest.mark.parametrize(("name", "thing"), list(public()), ids=lambda value: value if isinstance(value, str) else "")
def test_docstrings_name_every_argument(name, thing):
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if isinstance(thing, property):
        return
    shared = _SHARED.search(text)
    if shared:
        owner = getattr(rocketmq_spark, name.partition(".")[0])
        text += inspect.getdoc(getattr(owner, shared[1])) or ""
    if inspect.isclass(thing) and (issubclass(thing, enum.Enum) or getattr(thing, "_is_protocol", False)):
        return
    names = [p for p in inspect.signature(thing).parameters if p not in ("self", "args")]
    assert [p for p in names if not re.search(rf"\b{p}\b", text)] == []


def test_completion_lists_every_public_name() -> None:
    assert set(rocketmq_spark.__all__) <= set(dir(rocketmq_spark))
    assert len(rocketmq_spark.__all__) <= 31


CONSTRUCTORS = [rocketmq_spark.Producer, rocketmq_spark.Consumer, rocketmq_spark.PullConsumer]


@pytest.mark.parametrize("make", CONSTRUCTORS)
def test_name_server_and_group_may_be_positional(make) -> None:
    with make("127.0.0.1:1", "g") as made:
        assert made.client_id
    with make(nameServer="127.0.0.1:1", group="g") as made:
        assert made.client_id


@pytest.mark.parametrize("make", [*CONSTRUCTORS, rocketmq_spark.foreach_batch_writer])
def test_errors_name_the_keyword_that_was_typed(make) -> None:
    with pytest.raises(OptionError) as caught:
        make(name_server="nowhere", request_timeout="soon", connect_timeou=1, read_deadline="1s")
    text = str(caught.value)
    assert "option 'name_server' is 'nowhere'" in text
    assert "option 'request_timeout' is 'soon'" in text
    assert "option 'connect_timeou' is unknown; did you mean 'connect_timeout'?" in text
    with pytest.raises(OptionError, match="option 'read_deadline' does not belong to"):
        make(name_server="h:1", read_deadline="1s")


PROGRAM = """
from collections.abc import Sequence

from rocketmq_spark import (
    Admin, Consumer, Context, LocalBroker, Message, MessageQueue, Producer, PullConsumer, ReceivedMessage, SendResult,
    SimpleConsumer, foreach_batch_writer, write_rocketmq,
)
from rocketmq_spark.errors import AccessDenied


def listener(messages: Sequence[ReceivedMessage], context: Context) -> object:
    return context.retry(3) if messages[0].reconsume_times else None


def run(name_server: str) -> int | None:
    with Producer(name_server, "g", send_timeout="5s", auto_batch=True, batch_max_bytes=4096) as producer:
        result: SendResult = producer.send(Message("t", b"x", keys=["k"]), selector="hash", arg="7")
    with Consumer(name_server, group="g", ordered=False, consume_thread_min=4) as consumer:
        consumer.start(listener)
    with PullConsumer(name_server=name_server, group="g", consume_from_where="earliest") as reader:
        got: list[ReceivedMessage] = reader.poll(timeout_s=1.0)
    try:
        SimpleConsumer(group="g", proxy_endpoint="h:1").close()
    except AccessDenied:
        pass
    with Admin(name_server, tls=True, request_timeout="5s") as admin:
        lag: int | None = admin.describe_group("g").lag
        print(lag, admin.message("id", "t").body, admin.describe_topic("t").message_type)
    foreach_batch_writer(name_server, topic="out", queue_selector="hash")
    return result.queue_offset or (got[0].queue_offset if got else None)


{wrong}
"""


def _checked(folder: Path, wrong: str = "") -> str:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("{wrong}", wrong), "utf-8")
    root = Path(rocketmq_spark.__file__).parents[1]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        f"--cache-dir={folder}",
        program.name,
    ]
    done = subprocess.run(
        command, cwd=folder, env={"MYPYPATH": str(root)}, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr


def test_programs_are_checked_by_type(tmp_path: Path) -> None:
    """With the second run reading what the first one cached."""
    assert "Success" in _checked(tmp_path)
    told = _checked(tmp_path, 'Producer("h:1", "g", send_timeot=3)\nConsumer("h:1", "g", ordered=[1])')
    assert 'Unexpected keyword argument "send_timeot" for "Producer"; did you mean "send_timeout"?' in told
    assert 'Argument "ordered" to "Consumer" has incompatible type "list[int]"; expected "bool | str"' in told


def test_a_public_class_name_stands_for_one_class() -> None:
    """But for those of asyncio, which have the names of the others on purpose."""
    named = [module for module in modules() if not module.inner.startswith("aio")]
    classes = [node.name for module in named for node in module.tree.body if isinstance(node, ast.ClassDef)]
    names = Counter(name for name in classes if not name.startswith("_"))
    assert len(names) > 400
    assert [name for name, count in names.items() if count > 1] == []
