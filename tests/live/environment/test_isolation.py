"""Three environments on one topic of six queues, and three with topics of their own: what one sends is never seen by another,
however often it fails (3-1, 3-2).

Producers and consumers are ours and RocketMQ's own, and Spark writes to and reads the second environment, whose name a
variable tells it. Every third message fails twice, one in twenty always. RocketMQ's own client tells where messages lie:
in which queues, retry topics and dead letters.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from rocketmq_spark import Consumer, Producer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, ReceivedMessage
from tests.fix_spark import Script
from tests.live.consumer.members import JavaMember
from tests.mockbroker import eventually
from tests.scale import SCALE
from tests.witness import Record, java_read, java_send_to

NAMES = ("1", "2", "3")
BY_SPARK, BY_JAVA = "2", "3"  # who also reads an environment; ours read all of them
COUNT, TRIES = (500 if SCALE >= 1 else 40), 3
DELAYS = " ".join(["1s"] * 18)
GROUP = "billing"


def is_dead(number: int) -> bool:
    return number % 20 == 1


def fails(number: int, times: int) -> bool:
    return is_dead(number) or (number % 3 == 0 and times < 2)


def number_of(body: str) -> int:
    return int(body.split(":")[1])


class Mode(NamedTuple):
    """How environments are kept apart: the user's topic, and what brokers know instead."""

    topic: str
    suffix: bool

    def options(self, name: str) -> dict[str, str]:
        return {"environment": name, **self.common}

    @property
    def common(self) -> dict[str, str]:
        return {"environmentMode": "suffix"} if self.suffix else {"environments": str(len(NAMES))}

    def topic_of(self, name: str) -> str:
        return f"{self.topic}_{name}" if self.suffix else self.topic

    def group_of(self, name: str) -> str:
        return f"{GROUP}_{name}" if self.suffix else f"{GROUP}_env_{name}"

    def queues_of(self, name: str) -> tuple[int, ...]:
        """Of the topic on the wire."""
        return tuple(range(6)) if self.suffix else (int(name) - 1, int(name) + 2)

    @property
    def topics(self) -> set[str]:
        return {self.topic_of(name) for name in NAMES}


SHARED, APART = Mode("shared", suffix=False), Mode("apart", suffix=True)
MODES = (SHARED, APART)


class Handed(NamedTuple):
    """What a listener got; ``queue`` is None for what came from a retry topic."""

    id: str
    number: int
    times: int
    queue: int | None


class Seen:
    """What our listeners of one environment were handed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handed: list[Handed] = []

    def listener(self, messages: list[ReceivedMessage], context: object) -> object:
        (message,) = messages
        number, times = number_of(message.body.decode()), message.reconsume_times
        queue = None if message.queue.topic.startswith("%RETRY%") else message.queue.queue_id
        with self._lock:
            self._handed.append(Handed(message.msg_id, number, times, queue))
        assert message.topic in (SHARED.topic, APART.topic)
        if fails(number, times):
            raise ValueError(f"{number} fails")
        return None

    def handed(self) -> list[Handed]:
        with self._lock:
            return list(self._handed)


# Writes, waits until all others have, and reads: by a stream where queues are shared, else by a batch.
SPARK = """
    import time
    from pathlib import Path
    name_server, count, folder, shared, apart = sys.argv[1:]
    spark = new_session()
    common = {shared: {"environments": "3"}, apart: {"environmentMode": "suffix"}}
    rows = spark.createDataFrame([(f"spark:{i}:",) for i in range(int(count))], "body string").coalesce(1)
    for topic, options in common.items():
        rows.write.format("rocketmq").options(nameServer=name_server, topic=topic, **options).mode("append").save()
    report("written")
    while not Path(folder, "sent").exists():
        time.sleep(0.02)

    def stream(**more):
        given = {"nameServer": name_server, "subscribe": shared, "startingOffsets": "earliest", **common[shared], **more}
        ids = []

        def note(df, batch_id):
            ids.extend(row.msgId for row in df.collect())

        source = spark.readStream.format("rocketmq").options(**given).load().select("msgId")
        writer = source.writeStream.foreachBatch(note).option("checkpointLocation", f"{folder}/checkpoint")
        finish(writer.trigger(availableNow=True).start())
        return ids

    def refusal():
        try:
            stream(environment="3")
        except Exception as e:
            return str(e)

    batch = spark.read.format("rocketmq").options(nameServer=name_server, subscribe=apart, **common[apart]).load()
    report({shared: stream(), apart: [row.msgId for row in batch.select("msgId").collect()], "refusal": refusal()})
"""


@pytest.fixture
def mq(make_cluster: Callable[..., LocalBroker]) -> LocalBroker:
    cluster = make_cluster(conf={"messageDelayLevel": DELAYS})
    for mode in MODES:
        for topic in mode.topics:
            cluster.create_topic(topic, queues=6)
    return cluster


@pytest.fixture
def consumers(mq: LocalBroker) -> Iterator[dict[tuple[Mode, str], Callable[[], list[Handed]]]]:
    """Two members of the first environment, one of the second; one of ours and one of Java's share the third. What each
    environment was handed."""
    found: dict[tuple[Mode, str], Callable[[], list[Handed]]] = {}
    number = 0
    with ExitStack() as stack:
        for mode in MODES:
            for name in NAMES:
                seen = Seen()
                for _ in range(2 if name == "1" else 1):
                    number += 1  # connections of its own, and so a client id, for each
                    consumer = stack.enter_context(
                        Consumer(name_server=mq.name_server, group=GROUP, connect_timeout=f"{2990 + number}ms",
                                 consume_from_where="earliest", max_reconsume_times=TRIES, **mode.options(name))
                    )  # fmt: skip
                    consumer.subscribe(mode.topic)
                    consumer.start(seen.listener)
                found[mode, name] = seen.handed
            found[mode, BY_JAVA] = _with_java(mq, mode, found[mode, BY_JAVA], stack)
        yield found


def _with_java(
    mq: LocalBroker, mode: Mode, ours: Callable[[], list[Handed]], stack: ExitStack
) -> Callable[[], list[Handed]]:
    where = SimpleNamespace(mq=mq, topic=mode.topic_of(BY_JAVA), group=mode.group_of(BY_JAVA))
    queues = ",".join(map(str, mode.queues_of(BY_JAVA)))
    member = JavaMember(where, fail="some", tries=TRIES, queues=queues)  # type: ignore[arg-type]
    stack.callback(member.stop)

    def handed() -> list[Handed]:
        theirs = (
            Handed(each["id"], number_of(each["body"]), each["times"], None if each["times"] else each["queue"])
            for each in member.got()
        )
        return [*ours(), *theirs]

    return handed


def send(mq: LocalBroker) -> dict[tuple[Mode, str], dict[str, int]]:
    """From all environments by us, by Java into the first and the third; numbers by id."""

    def ours(mode: Mode, name: str) -> dict[str, int]:
        with Producer(
            send_timeout="60s", name_server=mq.name_server, group="p_environments", **mode.options(name)
        ) as producer:
            return {producer.send(Message(mode.topic, b"ours:%d:" % i)).msg_id: i for i in range(COUNT)}

    def theirs(mode: Mode, name: str) -> dict[str, int]:
        records = java_send_to(mq.name_server, mode.topic_of(name), mode.queues_of(name), COUNT, "java")
        return {record.id: record.index for record in records}

    with ThreadPoolExecutor(2) as pool:
        java = {
            (mode, name): pool.submit(theirs, mode, name) for mode, name in ((SHARED, "1"), (SHARED, "3"), (APART, "3"))
        }
        sent = {(mode, name): ours(mode, name) for mode in MODES for name in NAMES}
        for place, numbers in java.items():
            sent[place] |= numbers.result()
    return sent


def test_environments_are_isolated_with_retries_and_dead_letters(
    mq: LocalBroker, consumers: dict[tuple[Mode, str], Callable[[], list[Handed]]], start_script: Callable[..., Script],
    tmp_path: Path,
) -> None:  # fmt: skip
    spark = start_script(
        SPARK, mq.name_server, COUNT, tmp_path, SHARED.topic, APART.topic, ROCKETMQ_ENVIRONMENT=BY_SPARK
    )
    sent = send(mq)
    eventually(lambda: spark.so_far().reports or spark.process.poll(), 120)
    (tmp_path / "sent").touch()
    lying = java_read(mq.name_server, ",".join(SHARED.topics | APART.topics), bodies=True)
    for record in lying:
        if record.body.startswith(b"spark:"):
            mode = SHARED if record.topic == SHARED.topic else APART
            sent[mode, BY_SPARK][record.id] = number_of(record.body.decode())
    assert len(lying) == sum(map(len, sent.values())) == len({record.id for record in lying}) == 11 * COUNT
    where = {record.id: (record.topic, record.queue) for record in lying}
    for (mode, name), numbers in sent.items():
        assert {where[i][0] for i in numbers} == {mode.topic_of(name)}
        assert {where[i][1] for i in numbers} <= set(mode.queues_of(name))

    def over() -> bool:
        return all(_finished(numbers, consumers[place]()) for place, numbers in sent.items())

    eventually(over, 120)
    for (mode, name), numbers in sent.items():
        handed = consumers[mode, name]()
        assert {one.id for one in handed} == numbers.keys()
        assert {one.queue for one in handed} - {None} <= set(mode.queues_of(name))
    _check_failed(mq, sent)
    by_spark = spark.wait().report
    for mode in MODES:  # once each, and nothing else
        assert Counter(by_spark[mode.topic]) == Counter(sent[mode, BY_SPARK].keys())
    assert "the checkpoint is of environment '2', and this query of environment '3'" in by_spark["refusal"]


def _finished(numbers: dict[str, int], handed: list[Handed]) -> bool:
    """Whether each was handed out until it succeeded, or so often that it is dead."""
    times = Counter(one.id for one in handed)
    good = {one.id for one in handed if not fails(one.number, one.times)}
    return all(times[i] > TRIES if is_dead(number) else i in good for i, number in numbers.items())


def _check_failed(mq: LocalBroker, sent: dict[tuple[Mode, str], dict[str, int]]) -> None:
    """Dead letters and what was retried lie in the topics of the environment's group."""
    dead = {(mode, name): {i for i, n in numbers.items() if is_dead(n)} for (mode, name), numbers in sent.items()}
    topics = ",".join(f"%DLQ%{mode.group_of(name)}" for mode, name in sent)
    letters = by_topic(java_read(mq.name_server, topics, sum(map(len, dead.values()))))
    retried = by_topic(java_read(mq.name_server, ",".join(f"%RETRY%{mode.group_of(name)}" for mode, name in sent)))
    for (mode, name), numbers in sent.items():
        assert letters[f"%DLQ%{mode.group_of(name)}"] == dead[mode, name]
        assert retried[f"%RETRY%{mode.group_of(name)}"] == {i for i, n in numbers.items() if fails(n, 0)}


def by_topic(records: list[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in records:
        found.setdefault(record.topic, set()).add(record.id)
    return found
