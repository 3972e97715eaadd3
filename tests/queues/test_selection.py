from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest

from rocketmq_spark.base.java import Long
from rocketmq_spark.errors import OptionError, SelectorError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import RoundRobin, select
from tests.harness import in_one_test
from tests.helpers import raising
from tests.queues import names, qs, read

MESSAGE = Message("T", b"x")
SIX = qs("a:0-3 b:0-1")


def last_of_three(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
    return queues[2]


@in_one_test("case", read("select_by_hash"))
def test_hash_equals_the_java_class_on_every_vector(case: dict[str, Any]) -> None:
    arg = Long(case["arg"]) if case["arg_type"] == "Long" else case["arg"]
    for size, expected in case["selected_by_size"].items():
        queues = [MessageQueue("T", "b", i) for i in range(int(size))]
        assert select("hash", queues, MESSAGE, arg).queue_id == expected


@pytest.mark.parametrize("arg", [None, 1.0, b"key", object()])
def test_hash_refuses_an_arg_without_a_portable_hash(arg: object) -> None:
    with pytest.raises(SelectorError, match=r"queue selector 'hash': cannot hash .* pass the key as arg"):
        select("hash", SIX, MESSAGE, arg)


def test_the_three_strings_with_the_smallest_hash_do_not_fail() -> None:
    for text in ("polygenelubricants", "GydZG_", "DESIGNING WORKHOUSES"):
        assert select("hash", qs("b:0-2"), MESSAGE, text).queue_id == 2


def test_machine_room_without_rooms_chooses_none_and_says_so() -> None:
    for arg in (None, "", (), 3):
        with pytest.raises(SelectorError, match="chose no queue: pass a room"):
            select("machineRoom", SIX, MESSAGE, arg)


def test_machine_room_with_rooms_stays_inside_them() -> None:
    queues = qs("hz@b1:0-1 hz@b2:0 sh@b3:0 bj@b4:0 plain:0")
    rng = random.Random(1)
    found = {select("machineRoom", queues, MESSAGE, ["hz", "sh"], rng=rng) for _ in range(200)}
    assert found == set(qs("hz@b1:0-1 hz@b2:0 sh@b3:0"))
    assert select("machineRoom", queues, MESSAGE, "bj") == qs("bj@b4:0")[0]
    with pytest.raises(SelectorError, match="no broker is in gz; rooms of topic 'T' are bj, hz, sh"):
        select("machineRoom", queues, MESSAGE, "gz")
    with pytest.raises(SelectorError, match="no broker is in plain; rooms of topic 'T' are none"):
        select("machineRoom", qs("plain:0"), MESSAGE, "plain")


def test_random_is_uniform_and_can_be_seeded() -> None:
    queues = qs("a:0-3 b:0-3")
    counts = Counter(select("random", queues, MESSAGE, rng=random.Random(seed)) for seed in range(4000))
    expected = 4000 / 8
    assert sum((counts[queue] - expected) ** 2 / expected for queue in queues) < 24.3  # chi-square, 7 degrees, 0.1 %
    one, other = random.Random(7), random.Random(7)
    assert [select("random", queues, MESSAGE, rng=one) for _ in range(20)] == [
        select("random", queues, MESSAGE, rng=other) for _ in range(20)
    ]


def test_callable_or_its_name_chooses() -> None:
    assert select(last_of_three, SIX, MESSAGE) == SIX[2]
    assert select(f"{__name__}:last_of_three", SIX, MESSAGE) == SIX[2]
    seen: list[object] = []
    select(lambda queues, message, arg: seen.extend((message, arg)) or queues[0], SIX, MESSAGE, "A")  # type: ignore[func-returns-value]
    assert seen == [MESSAGE, "A"]


def test_callable_gets_a_copy_of_the_list() -> None:
    published = list(SIX)

    def greedy(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
        return queues.pop()

    assert select(greedy, published, MESSAGE) == SIX[-1]
    assert published == SIX


def test_what_a_callable_raises_is_wrapped_with_its_cause() -> None:
    with pytest.raises(SelectorError, match=r"select message queue threw exception: ZeroDivisionError") as e:
        select(lambda queues, message, arg: 1 / 0, SIX, MESSAGE)  # type: ignore[arg-type, return-value]
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    with pytest.raises(SelectorError, match="select message queue threw exception: SystemExit: mine"):
        select(raising(SystemExit("mine")), SIX, MESSAGE)


def test_callable_that_chooses_nothing_or_a_stranger_is_an_error() -> None:
    with pytest.raises(SelectorError, match="select message queue return null"):
        select(lambda queues, message, arg: None, SIX, MESSAGE)
    with pytest.raises(SelectorError, match="expected one of the 6 queues"):
        select(lambda queues, message, arg: MessageQueue("T", "z", 0), SIX, MESSAGE)
    with pytest.raises(SelectorError, match="expected one of the 6 queues"):
        select(lambda queues, message, arg: 3, SIX, MESSAGE)  # type: ignore[arg-type, return-value]


def test_environment_by_number_or_by_layout() -> None:
    assert names([select("environment", SIX, MESSAGE, 3)]) == "a:2"
    owned = {select("environment", SIX, MESSAGE, Environment.of(1, 2)) for _ in range(200)}
    assert owned == set(qs("a:0 a:2 b:0"))
    with pytest.raises(SelectorError, match="option 'environment' is 9; expected a whole number from 1 to 6"):
        select("environment", SIX, MESSAGE, 9)


def test_column_is_the_queue_that_the_data_names() -> None:
    assert select("column", SIX, MESSAGE, ("b", 1)) == SIX[5]
    assert select("column", SIX, MESSAGE, 3) == SIX[3]
    for arg, text in ((1, "is on brokers a, b; name the broker"), (("c", 0), "no queue of topic 'T' is"), (9, "no queue"),
                      (None, "no queue"), (True, "no queue")):  # fmt: skip
        with pytest.raises(SelectorError, match=text):
            select("column", SIX, MESSAGE, arg)


def test_selector_names_ignore_case_and_typos_get_suggestion() -> None:
    assert select("RANDOM", qs("a:0"), MESSAGE) == qs("a:0")[0]
    with pytest.raises(OptionError, match=r"option 'queueSelector' is 'hahs'; expected .* did you mean 'hash'"):
        select("hahs", SIX, MESSAGE)
    with pytest.raises(SelectorError, match="no queue to select from"):
        select("random", [], MESSAGE)


@pytest.mark.parametrize(
    ("stored", "returned", "after", "position"),
    [
        (2147483646, 2147483647, 2147483647, 1),
        (2147483647, 0, -2147483648, 0),
        (-1, 0, 0, 0),
        (-2147483648, 1, -2147483647, 1),
        (-7, 2147483642, -6, 2),
    ],
)
def test_the_index_wraps_like_javas(stored: int, returned: int, after: int, position: int) -> None:
    index = RoundRobin(counter=stored)
    assert index.next() == returned
    assert index.counter == after
    assert returned % 6 == position


@pytest.mark.parametrize(
    ("queues", "stored", "last", "picks", "after"),
    [
        ("a:0-3 b:0-1", 9, None, "b:0 b:1 a:0 a:1 a:2 a:3 b:0 b:1", 17),
        ("a:0-3 b:0-1", 5, "a", "b:0 b:1 b:0 b:1", 17),
        ("a:0-2", 0, "a", "a:1 a:2 a:0", 12),
    ],
)
def test_round_robin_avoids_the_last_broker(queues: str, stored: int, last: str, picks: str, after: int) -> None:
    index, listed = RoundRobin(counter=stored), qs(queues)
    assert names([index.pick(listed, last) for _ in picks.split()]) == picks
    assert index.counter == after


def test_eight_hundred_sends_of_one_thread_are_spread_evenly() -> None:
    queues = qs("a:0-3 b:0-3")
    counts = Counter(select("roundRobin", queues, MESSAGE) for _ in range(800))
    assert counts == dict.fromkeys(queues, 100)


def test_each_thread_starts_somewhere_else() -> None:
    queues = qs("a:0-999")
    first: list[MessageQueue] = []

    def work() -> None:
        first.append(select("roundRobin", queues, MESSAGE))

    for _ in range(12):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(set(first)) > 6


def test_reset_moves_to_a_place_of_its_own() -> None:
    index = RoundRobin(random.Random(3), counter=5)
    index.reset()
    assert index.counter is not None
    assert 0 <= index.counter < (1 << 31) - 1
    assert index.counter != 5
