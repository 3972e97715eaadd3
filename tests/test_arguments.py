"""Arguments of public calls with wrong types: each error names the argument, its value and what was expected."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Consumer, Message, MessageQueue, Producer, PullConsumer, SimpleConsumer, aio
from rocketmq_spark.base import arguments
from rocketmq_spark.consumer.listener import Context, OrderedContext, with_replier
from rocketmq_spark.errors import MessageRefused, OptionError, RocketMQError
from rocketmq_spark.session import consumers, producers
from tests.consumer.pull_bench import A
from tests.fakes.group_member import QueueMember
from tests.fakes.pop_member import FakeProxy
from tests.fakes.sender import ScriptedSender, ok
from tests.fakes.timer import Time

PROXY = {"transport": "grpc", "proxy_endpoint": "h:1"}


def message(**more: Any) -> Message:
    return Message(**{"topic": "T", "body": b"x", **more})


@pytest.fixture(autouse=True)
def sender(monkeypatch: pytest.MonkeyPatch) -> ScriptedSender:
    made = ScriptedSender(Time())
    monkeypatch.setattr(producers, "sender", lambda options: made)
    monkeypatch.setattr(consumers, "member", lambda options: QueueMember([A]))
    monkeypatch.setattr(consumers, "pop_member", lambda options: FakeProxy(T=1))
    return made


@pytest.fixture
def producer() -> Iterator[Producer]:
    with Producer("h:1", "g", transaction_check=lambda half: "COMMIT") as made:
        yield made


@pytest.fixture
def batching() -> Iterator[Producer]:
    with Producer("h:1", "g", auto_batch=True) as made:
        yield made


async def coroutine_function(messages: object, context: object) -> None:
    """A listener for ``aio``."""


def generator_function(messages: object, context: object) -> Iterator[None]:
    yield


class WithAsyncCall:
    async def __call__(self, messages: object, context: object) -> None:
        """A listener for ``aio``."""


class WithCall:
    def __call__(self, messages: object, context: object) -> None:
        """A listener."""

    def method(self, messages: object, context: object) -> None:
        """A listener, too."""


NOT_LISTENERS = {
    "None": None,
    "number": 5,
    "text": "handle",
    "coroutine function": coroutine_function,
    "partial of one": functools.partial(coroutine_function),
    "object with one": WithAsyncCall(),
    "generator function": generator_function,
    "no parameter": lambda: None,
    "one parameter": lambda messages: None,
    "three parameters": lambda messages, context, more: None,
    "class": WithCall,
}
LISTENERS = {
    "function": lambda messages, context: None,
    "default": lambda messages, context, more=1: None,
    "any": lambda *given: None,
    "object": WithCall(),
    "method": WithCall().method,
    "built-in": list,
    "partial": functools.partial(lambda more, messages, context: None, 1),
}
KINDS: list[dict[str, Any]] = [{}, {"ordered": True}, {"arrow": True}, PROXY]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("listener", NOT_LISTENERS.values(), ids=NOT_LISTENERS)
def test_what_is_no_listener_is_refused_at_the_start(listener: Any, options: dict[str, Any]) -> None:
    with Consumer(**{"name_server": "h:1", "group": "g", **options}) as consumer:
        consumer.subscribe("T")
        expected = re.escape("batch, context" if options.get("arrow") else "messages, context")
        for start in (consumer.start, consumer.run):
            with pytest.raises(
                OptionError, match=rf"listener (is|takes) .*; expected a function that takes \({expected}"
            ):
                start(listener)
        assert consumer.stats().topics == {}  # it has not started


def test_a_listener_is_checked_beneath_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with Consumer("h:1", "g", open_telemetry=True) as consumer:
        consumer.subscribe("T")
        with pytest.raises(OptionError, match="listener is None"):
            consumer.start(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("listener", [value for name, value in LISTENERS.items() if name != "built-in"])
def test_what_can_be_called_with_messages_is_a_listener(listener: Any) -> None:
    arguments.check_function("listener", listener, "messages, context")


def test_decorator_may_supply_missing_arguments_of_listener() -> None:
    """``functools.wraps`` shows the parameters of the function inside, which the caller does not fill."""

    def stored(database: Any, messages: Any, context: Any) -> None: ...

    @functools.wraps(stored)
    def listener(messages: Any, context: Any) -> None:
        return stored(None, messages, context)

    arguments.check_function("listener", listener, "messages, context")
    with pytest.raises(OptionError, match="listener takes "):
        arguments.check_function("listener", functools.wraps(listener)(stored), "messages, context")


def test_the_parameters_of_a_built_in_function_are_unknown() -> None:
    arguments.check_function("key", str, "message")


@pytest.mark.parametrize("name", ["None", "number", "generator function", "one parameter", "class"])
def test_what_is_no_listener_of_coroutines_is_refused(name: str) -> None:
    async def body() -> None:
        async with aio.Consumer("h:1", "g") as consumer:
            await consumer.subscribe("T")
            with pytest.raises(OptionError, match=r"listener (is|takes) "):
                await consumer.start(NOT_LISTENERS[name])

    asyncio.run(body())


NO_CHECKS = {
    "number": 5,
    "text": "COMMIT",
    "coroutine function": coroutine_function,
    "no parameter": lambda: "COMMIT",
    "two parameters": lambda one, two: "COMMIT",
}


@pytest.mark.parametrize("check", NO_CHECKS.values(), ids=NO_CHECKS)
def test_a_transaction_check_is_checked(check: Any) -> None:
    if check is not None:
        with pytest.raises(
            OptionError, match=r"transaction_check (is|takes) .*expected a function that takes \(message\)"
        ):
            Producer("h:1", "g", transaction_check=check)


def test_a_transaction_check_of_coroutines_is_for_aio() -> None:
    async def body() -> None:
        async def decide(half: object) -> str:
            return "COMMIT"

        await aio.Producer("h:1", "g", transaction_check=decide).close()
        with pytest.raises(OptionError, match="transaction_check"):
            aio.Producer("h:1", "g", transaction_check=5)  # type: ignore[arg-type]

    asyncio.run(body())


async def selects(queues: Any, message: Any, arg: Any) -> Any:
    return queues[0]


@pytest.mark.parametrize("selector", [5, b"hash", selects], ids=["number", "bytes", "coroutine function"])
def test_a_selector_of_another_kind_is_refused(producer: Producer, sender: ScriptedSender, selector: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a coroutine was never awaited
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(OptionError, match=r"option 'queueSelector' is .*; expected"):
                send(message(), selector=selector)
        gc.collect()
    assert sender.calls == []


@pytest.mark.parametrize("make", [Consumer, PullConsumer])
def test_an_allocation_strategy_returns_its_result(make: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="option 'allocationStrategy' is the coroutine function"):
        make("h:1", "g", allocation_strategy=selects)


def test_a_hook_is_checked(producer: Producer) -> None:
    for given in ({"before": 5}, {"after": "x"}, {"before": selects}, {"after": lambda: None}):
        with pytest.raises(OptionError, match=f"{next(iter(given))} (is|takes) "):
            producer.add_hook(**given)  # type: ignore[arg-type]


BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "the message is None; expected a Message"),
    (b"x", "the message is b'x'; expected a Message"),
    (message(topic=5), "the message's topic is 5; expected a str"),
    (message(topic=b"T"), "the message's topic is b'T'; expected a str"),
    (message(topic=["T"]), "the message's topic is ['T']; expected a str"),
    (message(tags=b"vip"), "the message's tags are b'vip'; expected a str"),
    (message(tags=["a", "b"]), "the message's tags are ['a', 'b']; expected a str with one tag"),
    (message(keys=b"k"), "the message's keys are b'k'; expected a str, or a list of str"),
    (message(keys=[1]), "the message's keys are [1]; expected a str, or a list of str"),
    (message(keys=5), "the message's keys are 5; expected a str, or a list of str"),
    (message(properties={"region": b"eu"}), "property 'region' is b'eu'; expected a str"),
    (message(properties={"n": 1}), "property 'n' is 1; expected a str"),
    (message(properties={1: "a"}), "the name of property 1 is int; expected a str"),
    (message(properties=[("a", "b")]), "the message's properties are [('a', 'b')]; expected a dict"),
    (message(flag="1"), "the message's flag is '1'; expected a signed 32-bit int"),
    (message(flag=None), "the message's flag is None; expected a signed 32-bit int"),
    (message(flag=0.0), "the message's flag is 0.0; expected a signed 32-bit int"),
    (message(wait_store_ok="no"), "the message's wait_store_ok is 'no'; expected True or False"),
]


@pytest.mark.parametrize(("bad", "text"), BAD_MESSAGES, ids=[text for _, text in BAD_MESSAGES])
def test_a_message_of_wrong_types_is_refused(
    producer: Producer, batching: Producer, sender: ScriptedSender, bad: Any, text: str
) -> None:
    sends: list[Callable[[Any], Any]] = [
        producer.send,
        producer.send_async,
        producer.send_oneway,
        producer.send_half,
        lambda given: producer.send_batch([message(), given]),
        batching.send,
        batching.send_async,
    ]
    for send in sends:
        with pytest.raises(MessageRefused, match=re.escape(text)):
            send(bad)
    assert sender.calls == []


def test_properties_without_a_value_are_left_out(
    producer: Producer, batching: Producer, sender: ScriptedSender
) -> None:
    for each in (producer, batching):
        each.send_async(message(properties={"a": None, "b": "x"})).result(60)
    assert len(sender.calls) == 2
    assert "b\x01x\x02" in sender.requests[0].properties
    assert "a\x01" not in sender.requests[0].properties


QUEUE: Any = "T/a/0"
CALLS: dict[str, tuple[Callable[[Producer], Any], str]] = {
    "queue": (lambda p: p.send(message(), queue=QUEUE), "queue is 'T/a/0'; expected a MessageQueue"),
    "queue of a batch": (lambda p: p.send_batch([message()], QUEUE), "queue is 'T/a/0'; expected a MessageQueue"),
    "queue of many": (lambda p: p.send_many([message()], queue=QUEUE), "queue is 'T/a/0'; expected a MessageQueue"),
    "timeout": (lambda p: p.send(message(), timeout_s="3"), "timeout_s is '3'; expected a number of seconds"),  # type: ignore[arg-type]
    "bool": (lambda p: p.send(message(), timeout_s=True), "timeout_s is True; expected a number of seconds"),
    "flush": (lambda p: p.flush("1"), "timeout_s is '1'; expected a number of seconds"),  # type: ignore[arg-type]
    "close": (lambda p: p.close([]), "timeout_s is []; expected a number of seconds"),  # type: ignore[arg-type]
    "callback": (lambda p: p.send_async(message(), 5), "callback is 5; expected a function"),  # type: ignore[arg-type]
    "coroutine": (lambda p: p.send_async(message(), selects), "callback is the coroutine function"),  # type: ignore[arg-type]
    "batch": (lambda p: p.send_batch(message()), "messages is Message(topic='T'"),  # type: ignore[arg-type]
    "many": (lambda p: p.send_many(None), "messages is None; expected an iterable of messages"),  # type: ignore[arg-type]
    "key": (lambda p: p.send_many([message()], key=5), "key is 5; expected a function"),  # type: ignore[arg-type]
    "topic": (lambda p: p.queues(b"T"), "topic is b'T'; expected the name of a topic"),  # type: ignore[arg-type]
    "handle": (lambda p: p.recall("T", None), "recall_handle is None; expected"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_an_argument_of_a_producer_is_checked(producer: Producer, call: Callable[[Producer], Any], text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        call(producer)


def test_a_decision_takes_seconds(producer: Producer, sender: ScriptedSender) -> None:
    sender.script = [lambda queue, request: ok(queue, request)._replace(offset_msg_id="0" * 32)]
    half = producer.send_half(message())
    with pytest.raises(OptionError, match="timeout_s is '1'; expected a number of seconds"):
        half.commit("1")  # type: ignore[arg-type]
    half.commit()


def test_a_reply_is_to_a_message() -> None:
    replied: list[object] = []
    for context in (Context(A), OrderedContext(A, True)):
        context = with_replier(context, [], lambda to, body, properties: replied.append(body))
        with pytest.raises(OptionError, match="to is 5; expected the ReceivedMessage"):
            context.reply(b"x", to=5)  # type: ignore[arg-type]
    assert replied == []


async def _sends(text: str, **how: Any) -> None:
    async with aio.Producer("h:1", "g") as producer, asyncio.timeout(60):
        with pytest.raises(RocketMQError, match=text):
            await producer.send(message(), **how)


@pytest.mark.parametrize("how", [{"timeout_s": "1"}, {"queue": 5}, {"selector": 5}], ids=str)
def test_an_argument_of_a_coroutine_is_checked(how: dict[str, Any]) -> None:
    """On the thread that begins the first send to a topic, it would have left the coroutine waiting."""
    asyncio.run(_sends(" is .*; expected", **how))


SUBSCRIBERS: list[Callable[[], Any]] = [
    lambda: Consumer("h:1", "g"),
    lambda: PullConsumer("h:1", "g"),
    lambda: SimpleConsumer(group="g", proxy_endpoint="h:1"),
]


@pytest.mark.parametrize("make", SUBSCRIBERS, ids=["Consumer", "PullConsumer", "SimpleConsumer"])
def test_a_subscription_of_wrong_types_is_refused(make: Callable[[], Any]) -> None:
    with make() as consumer:
        for topic in (None, 5, b"T", ["T"], MessageQueue("T", "a", 0), "", " "):
            for call in (consumer.subscribe, consumer.unsubscribe):
                with pytest.raises(OptionError, match=r"topic is .*; expected the name of a topic"):
                    call(topic)
        for given in ({"tags": b"a"}, {"tags": ["a"]}, {"tags": 5}, {"sql": b"a"}, {"tags": " "}, {"sql": " "}):
            with pytest.raises(OptionError, match=f"{next(iter(given))} (is|are) .*; expected"):
                consumer.subscribe("t", **given)


PULLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "queues": (lambda c: c.queues(["t"]), "topic is ['t']; expected the name of a topic"),
    "no list": (lambda c: c.assign(None), "queues is None; expected a list of MessageQueue"),
    "pause": (lambda c: c.pause([A]), "a queue is [MessageQueue"),
    "resume": (lambda c: c.resume("t"), "a queue is 't'; expected a MessageQueue"),
    "seek": (lambda c: c.seek("t", 0), "a queue is 't'; expected a MessageQueue"),
    "beginning": (lambda c: c.seek_to_beginning([A]), "a queue is [MessageQueue"),
    "end": (lambda c: c.seek_to_end([A]), "a queue is [MessageQueue"),
    "time": (lambda c: c.seek_to_timestamp(1.5), "epoch_ms is 1.5; expected a whole number"),
    "end as time": (lambda c: c.seek_to_timestamp(-1), "epoch_ms is -1; expected a whole number"),
    "no time": (lambda c: c.seek_to_timestamp(A), "epoch_ms is MessageQueue"),
    "commit": (lambda c: c.commit([A]), "offsets is [MessageQueue"),
    "commit of": (lambda c: c.commit({"t": 1}), "a queue is 't'; expected a MessageQueue"),
    "committed": (lambda c: c.committed([A]), "a queue is [MessageQueue"),
    "poll": (lambda c: c.poll("1"), "timeout_s is '1'; expected a number of seconds"),
}


@pytest.mark.parametrize(("call", "text"), PULLS.values(), ids=PULLS)
def test_an_argument_of_a_pull_consumer_is_checked(call: Callable[[Any], Any], text: str) -> None:
    with PullConsumer("h:1", "g") as consumer:
        consumer.assign([A])
        with pytest.raises(OptionError, match=re.escape(text)):
            call(consumer)


SIMPLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "count": (lambda c: c.receive("1"), "max_messages is '1'; expected a whole number from 1 to 32"),
    "bool": (lambda c: c.receive(True), "max_messages is True; expected a whole number from 1 to 32"),
    "invisible": (lambda c: c.receive(1, None), "invisible is None; expected a duration"),
    "wait": (lambda c: c.receive(1, "30s", b"5s"), "wait is b'5s'; expected a duration"),
    "ack": (lambda c: c.ack([1]), "message is [1]; expected a message that receive() returned"),
    "change": (lambda c: c.change_invisible(None, "30s"), "message is None; expected a message"),
    "dead letter": (lambda c: c.forward_to_dlq(5), "message is 5; expected a message"),
}


@pytest.mark.parametrize(("call", "text"), SIMPLE.values(), ids=SIMPLE)
def test_an_argument_of_a_simple_consumer_is_checked(call: Callable[[Any], Any], text: str) -> None:
    with SimpleConsumer(group="g", proxy_endpoint="h:1") as consumer:
        consumer.subscribe("T")
        with pytest.raises(OptionError, match=re.escape(text)):
            call(consumer)


@pytest.mark.parametrize("make", [Producer, Consumer, PullConsumer])
def test_bytes_are_no_option(make: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="option 'group' is b'g'; expected a str, not bytes"):
        make("h:1", b"g")
    with pytest.raises(OptionError, match=r"option 'address_map' is .*; expected values that JSON can contain"):
        make("h:1", "g", address_map={"a:1": b"b:1"})


def test_a_long_value_is_cut() -> None:
    with pytest.raises(MessageRefused) as caught:
        Producer("h:1", "g").send(b"x" * 10_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 250


def test_names_that_are_compared_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server decides how many names there are, and the comparison is quadratic: it takes less than half a second."""
    compared: list[list[str]] = []
    monkeypatch.setattr(
        arguments.difflib, "get_close_matches", lambda name, names, **how: compared.append([name, *names]) or []
    )
    arguments.similar_names(
        "t" * 255, ["t" * 128, *(f"t{n}" for n in range(5000)), *(f"u{n}" for n in range(5000))], 3, 0.5
    )
    assert compared[0][1:] == [f"t{n}" for n in range(5000)] + [f"u{n}" for n in range(len(compared[0]) - 5001)]
    assert 5001 < len(compared[0]) < 7000
    assert max(map(len, compared[0])) == 127
