"""Members of consumer groups on older brokers, beside one of RocketMQ's own client; what fails; what is decided later; traces."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from rocketmq_spark import Consumer, Context, Message, Producer, ReceivedMessage, TransactionState
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model.send import HalfState
from rocketmq_spark.producer import transactions
from rocketmq_spark.wire.names import DLQ_PREFIX
from tests.compat.features import runs
from tests.helpers import awaited, killed, stored_now
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed
from tests.scale import soak
from tests.witness import java_read, mqadmin

Make = Callable[..., str]
GROUP = "a consumer group, also beside members of Java's"


def handed(crew: Members, *others: Any) -> Counter[str]:
    return Counter([*crew.bodies(), *(body for other in others for body in other.bodies())])


def twice(crew: Members, *others: Any) -> list[tuple[str, str, int, int]]:
    """What was handed more than once: the body, to whom, and where it lies (in two places when it was sent twice)."""
    seen = [(m.body.decode(), client, m.queue_id, m.queue_offset) for client, m in crew.got]
    seen += [(line["body"], "java", line["queue"], line["offset"]) for other in others for line in other.got()]
    count = Counter(body for body, *_ in seen)
    return sorted(each for each in seen if count[each[0]] > 1)


@runs(GROUP)
def test_python_and_java_members_share_queues_without_repeats(crew: Members) -> None:
    ours = [crew.start(persist_interval_s=0.2), crew.start(persist_interval_s=0.2)]
    with crew.java() as theirs:
        eventually(lambda: crew.owned(ours[0]) + crew.owned(ours[1]) < 8, 60)
        eventually(lambda: 0 < crew.owned(ours[0]) <= 3 and 0 < crew.owned(ours[1]) <= 3, 60)
        sent = feed(crew.mq, crew.topic, 240)
        eventually(lambda: set(handed(crew, theirs)) == set(sent), 60)
        assert twice(crew, theirs) == []
        assert theirs.bodies()
        assert len({client for client, _ in crew.got}) == 2
        read: Counter[tuple[str, int]] = Counter()
        for _, message in crew.got:
            place = message.broker_name, message.queue_id
            read[place] = max(read[place], message.queue_offset + 1)
        # Else one of ours might begin a queue of the other, which has not heard of the change yet, at an older offset. The
        # offsets of Java's member, which come with its pulls, do not count.
        eventually(
            lambda: {(q.broker_name, q.queue_id): at for q, at in crew.stored().items()}.items() >= read.items(), 60
        )
    # Java stores its offsets every ten seconds, and says the last ones as it leaves without awaiting an answer.
    eventually(lambda: [crew.owned(each) for each in ours] == [4, 4], 60)
    more = feed(crew.mq, crew.topic, 80)
    eventually(lambda: set(handed(crew, theirs)) == {*sent, *more}, 60)
    assert set(handed(crew, theirs) - Counter([*sent, *more])) <= set(theirs.bodies())
    # A last pull of Java's member may store an older offset after ours, until our next pull brings ours again.
    eventually(lambda: sum(offset or 0 for offset in crew.stored().values()) == 320, 60)
    assert [consumer.stop() for consumer in ours] == [[], []]
    assert sum(offset or 0 for offset in crew.stored().values()) == 320


@soak
@runs(GROUP)
def test_no_message_is_lost_when_a_broker_is_killed_repeatedly(crew: Members) -> None:
    ours = [crew.start(), crew.start()]
    sent: list[str] = []
    with crew.java() as theirs:
        for _ in range(5):
            sent += feed(crew.mq, crew.topic, 4000)
            killed(crew.mq, "broker-a")
            crew.mq.restart("broker-a")
        eventually(lambda: set(handed(crew, theirs)) == set(sent), 180)
    assert theirs.bodies()
    assert [consumer.stop() for consumer in ours] == [[], []]


@runs("an ordered group, also beside members of Java's")
def test_python_and_java_ordered_members_keep_queue_order(crew: Members) -> None:
    first = crew.start(ordered=True)
    eventually(lambda: crew.owned(first) == 8, 60)
    sent = feed(crew.mq, crew.topic, 160)
    with crew.java(ordered="true") as theirs:
        eventually(lambda: crew.owned(first) == 4, 90)
        sent += feed(crew.mq, crew.topic, 160)
        eventually(lambda: set(handed(crew, theirs)) == set(sent), 90)
        # As it leaves, ours may own its queues before the broker has its last offsets, for which it awaits no answer.
        assert twice(crew, theirs) == []
    offsets: dict[tuple[str, int], list[int]] = defaultdict(list)
    for _, message in crew.got:
        offsets["ours", message.queue_id].append(message.queue_offset)
    for line in theirs.got():
        offsets["theirs", line["queue"]].append(line["offset"])
    assert all(each == sorted(each) for each in offsets.values())
    assert {who for who, _ in offsets} == {"ours", "theirs"}


RETRIES = "retries, and dead letters"


def failing(messages: Any, context: Any) -> Any:
    return context.retry(1) if messages[0].reconsume_times < 2 else context.retry(-1)


def dies(crew: Members, body: str, times: list[int]) -> None:
    consumer = crew.start(failing)
    eventually(lambda: consumer.stats().sent_back == len(times), 90)
    assert [message.reconsume_times for _, message in crew.got] == times
    assert {(message.topic, message.body.decode()) for _, message in crew.got} == {(crew.topic, body)}
    (dead,) = java_read(crew.mq.name_server, DLQ_PREFIX + crew.group, 1, bodies=True)
    assert dead.body.decode() == body
    assert consumer.stop() == []


@runs(RETRIES)
def test_a_failed_message_comes_again_and_ends_with_the_dead(crew: Members) -> None:
    (body,) = feed(crew.mq, crew.topic, 1, queues=[0])
    dies(crew, body, [0, 1, 2])


@soak
@runs(RETRIES)
def test_what_a_java_member_failed_comes_to_us_with_its_count(crew: Members) -> None:
    with crew.java(fail=True) as theirs:
        (body,) = feed(crew.mq, crew.topic, 1, queues=[0])
        eventually(lambda: theirs.bodies() == [body], 60)
        eventually(lambda: 1 in crew.stored().values(), 60)  # so it has sent it back
    dies(crew, body, [1, 2])


@runs("request and reply")
def test_a_request_has_its_reply(older: LocalBroker, make: Make) -> None:
    topic = make(2)

    def answer(messages: tuple[ReceivedMessage, ...], context: Context) -> None:
        context.reply(b"of " + messages[0].body)

    with (
        Consumer(older.name_server, f"g-{topic}", consume_from_where="earliest") as consumer,
        Producer(older.name_server, "askers") as producer,
    ):
        consumer.subscribe(topic)
        consumer.start(answer)
        asked = [producer.request_async(Message(topic, b"%d" % n), timeout_s=60) for n in range(20)]
        assert [future.result(60).body for future in asked] == [b"of %d" % n for n in range(20)]


@runs("transactions: commit, rollback, and the broker's check of undecided ones")
def test_transactions(older: LocalBroker, make: Make) -> None:
    """One stays open until the broker has asked about it, and is delivered once."""
    topic, asked = make(2), Counter[bytes]()
    group, unknown = f"g-{topic}", lambda message: "UNKNOWN"

    def check(message: ReceivedMessage) -> str:
        asked[message.body] += 1
        return "COMMIT" if message.body.startswith(b"later yes") else "ROLLBACK"

    with Producer(older.name_server, group, transaction_check=unknown) as producer:
        for n in range(10):
            with producer.transaction(Message(topic, b"yes %d" % n, tags="a")) as half:
                assert half.state is HalfState.PREPARED
            with contextlib.suppress(KeyError), producer.transaction(Message(topic, b"no %d" % n)):
                raise KeyError
        for n in range(3):
            producer.send_half(Message(topic, b"later yes %d" % n))
            producer.send_half(Message(topic, b"later no %d" % n))
    transactions._registry._recent_fates.clear()  # as in another process
    later = {b"later %s %d" % (word, n) for word, n in itertools.product((b"yes", b"no"), range(3))}
    with Producer(older.name_server, group, transaction_check=check) as producer:
        with producer.transaction(Message(topic, b"slow")) as half:
            before = half._fate._place
            eventually(lambda: half._fate._place != before, 60)  # the broker has asked
        eventually(lambda: later <= set(asked), 60)
        eventually(lambda: len(stored_now(older, topic)) >= 14, 60)
    expected = Counter([b"slow", *(b"yes %d" % n for n in range(10)), *(b"later yes %d" % n for n in range(3))])
    assert set(asked) == later
    assert Counter(record.body for record in java_read(older.name_server, topic, 14, bodies=True)) == expected


@runs("message traces")
def test_traces_are_shown_by_rocketmqs_own_tool(older: LocalBroker, make: Make) -> None:
    topic = make(1)
    over = threading.Event()
    check = lambda message: TransactionState.UNKNOWN  # noqa: E731
    with Producer(older.name_server, "shop", enable_trace=True, transaction_check=check) as producer:
        one = producer.send(Message(topic, b"one", tags="A", keys=["k1"])).msg_id
        with producer.transaction(Message(topic, b"half")) as half:
            pass
    seen: set[str] = set()

    def listen(messages: Any, context: Any) -> None:
        seen.add(messages[0].msg_id)
        if len(seen) == 2:
            over.set()

    with Consumer(older.name_server, f"g-{topic}", enable_trace=True, consume_from_where="earliest") as consumer:
        consumer.subscribe(topic)
        consumer.start(listen)
        assert over.wait(60)
    for msg_id in (one, half.result.msg_id):

        def shown(msg_id: str = msg_id) -> list[tuple[str, str, str]]:
            said = mqadmin("queryMsgTraceById", "-n", older.name_server, "-i", msg_id)
            lines = [line.split() for line in said.splitlines() if line.startswith(("Pub", "Sub"))]
            return sorted((line[0], line[1], line[-1]) for line in lines)

        found = awaited(shown, lambda lines: len(lines) >= 2)
        assert found == [("Pub", "shop", "success"), ("Sub", f"g-{topic}", "success")]
