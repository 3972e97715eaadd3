from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.allocation import STRATEGIES, allocate, allocate_all
from tests.harness import in_one_test
from tests.queues import names, q, qs, read

CASES = read("allocation")
JAVA_NAMES = {
    "AVG": "averagely",
    "AVG_BY_CIRCLE": "averagelyByCircle",
    "CONSISTENT_HASH": "consistentHash",
    "CONFIG": "config",
    "MACHINE_ROOM": "machineRoom",
    "MACHINE_ROOM_NEARBY-AVG": "machineRoomNearby",
    "MACHINE_ROOM_NEARBY-AVG_BY_CIRCLE": "machineRoomNearby",
}


def before_dash(name: str) -> str:
    return name.partition("-")[0]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    topic = case["topic"]
    match case["strategy"]:
        case "CONSISTENT_HASH":
            return {"virtualNodes": case["virtual_nodes"]}
        case "CONFIG":
            return {"allocationConfig": [q(text, topic) for text in case["configured"]]}
        case "MACHINE_ROOM":
            return {"machineRooms": case["consumer_idcs"]}
        case "MACHINE_ROOM_NEARBY-AVG":
            return {"inner": "averagely", "room": before_dash}
        case "MACHINE_ROOM_NEARBY-AVG_BY_CIRCLE":
            return {"inner": "averagelyByCircle", "room": before_dash}
    return {}


@in_one_test("case", CASES)
def test_every_vector_of_the_java_classes(case: dict[str, Any]) -> None:
    queues = [q(text, case["topic"]) for text in case["queues"]]
    for consumer, expected in case["result"].items():
        arguments = (JAVA_NAMES[case["strategy"]], consumer, queues[::-1], case["clients"][::-1])
        if isinstance(expected, dict):
            with pytest.raises(ValueError) as e:
                allocate(*arguments, **config_of(case))
            assert expected["message"] in str(e.value)
        else:
            assert names(allocate(*arguments, **config_of(case))).split() == expected


def shares(strategy: Any, queues: list[MessageQueue], consumers: list[str], **config: Any) -> str:
    """The share of each consumer in the order given, as the tables of the contract write them."""
    found = (allocate(strategy, consumer, queues, consumers, **config) for consumer in consumers)
    return " / ".join(" ".join(str(queue.queue_id) for queue in share) or "-" for share in found)


TABLE = [
    (8, 3, "0 1 2 / 3 4 5 / 6 7", "0 3 6 / 1 4 7 / 2 5"),
    (10, 4, "0 1 2 / 3 4 5 / 6 7 / 8 9", "0 4 8 / 1 5 9 / 2 6 / 3 7"),
    (5, 8, "0 / 1 / 2 / 3 / 4 / - / - / -", "0 / 1 / 2 / 3 / 4 / - / - / -"),
    (4, 4, "0 / 1 / 2 / 3", "0 / 1 / 2 / 3"),
    (7, 2, "0 1 2 3 / 4 5 6", "0 2 4 6 / 1 3 5"),
    (1, 3, "0 / - / -", "0 / - / -"),
    (3, 2, "0 1 / 2", "0 2 / 1"),
    (6, 4, "0 1 / 2 3 / 4 / 5", "0 4 / 1 5 / 2 / 3"),
    (12, 5, "0 1 2 / 3 4 5 / 6 7 / 8 9 / 10 11", "0 5 10 / 1 6 11 / 2 7 / 3 8 / 4 9"),
]


@pytest.mark.parametrize(("count", "clients", "block", "circle"), TABLE)
def test_and_4_12_the_tables_of_averagely_and_by_circle(count: int, clients: int, block: str, circle: str) -> None:
    queues, consumers = qs(f"b:0-{count - 1}"), [f"c{i}" for i in range(clients)]
    assert shares("averagely", queues, consumers) == block
    assert shares("averagelyByCircle", queues, consumers) == circle


def test_lists_in_any_order_give_everyone_the_same_view() -> None:
    queues, consumers = qs("broker-b:0-1 broker-a:0-3 broker-c:0-2"), ["c3", "c0", "c2", "c1"]
    found = [names(allocate("averagely", c, queues, consumers)) for c in sorted(consumers)]
    assert found == [
        "broker-a:0 broker-a:1 broker-a:2",
        "broker-a:3 broker-b:0",
        "broker-b:1 broker-c:0",
        "broker-c:1 broker-c:2",
    ]
    circle = [names(allocate("averagelyByCircle", c, queues[::-1], consumers)) for c in sorted(consumers)]
    assert circle == [
        "broker-a:0 broker-b:0 broker-c:2",
        "broker-a:1 broker-b:1",
        "broker-a:2 broker-c:0",
        "broker-a:3 broker-c:1",
    ]


def test_client_ids_sort_as_texts() -> None:
    ids = ["192.168.1.9@7", "192.168.1.10@DEFAULT", "192.168.1.10@9", "192.168.1.10@12"]
    assert list(allocate_all("averagely", qs("b:0-3"), ids)) == ids[::-1]


def test_consistent_hash_moves_only_the_queues_of_a_leaver() -> None:
    queues = qs("broker-a:0-5 broker-b:0-3", "TopicTest")
    four = ["10.0.0.1@1001", "10.0.0.2@1002", "10.0.0.3@1003", "10.0.0.4@1004"]
    before = allocate_all("consistentHash", queues, four)
    assert names(before[four[2]]) == "broker-a:1 broker-a:3 broker-b:3"
    after = allocate_all("consistentHash", queues, [c for c in four if c != four[2]])
    assert names(after[four[0]]) == "broker-a:0 broker-a:1 broker-b:2 broker-b:3"
    assert all(set(before[c]) <= set(after[c]) for c in after)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(10, "1 6 7 / 2 / 0 3 4 5"), (3, "0 3 5 6 7 / 1 2 / 4"), (1, "3 5 / 1 2 4 / 0 6 7"), (0, "- / - / -")],
)
def test_consistent_hash_with_other_counts_of_places(nodes: int, expected: str) -> None:
    queues = qs("brokerName:0-7", "topic_test")
    assert shares("consistentHash", queues, ["CID-0", "CID-1", "CID-2"], virtualNodes=nodes) == expected


@pytest.mark.parametrize("nodes", [-1, "3", True])
def test_bad_count_of_places_is_an_argument_error(nodes: object) -> None:
    with pytest.raises(OptionError, match=f"illegal virtualNodeCnt :{nodes}"):
        allocate("consistentHash", "c", qs("b:0"), ["c"], virtualNodes=nodes)


def test_config_is_the_list_given_by_hand() -> None:
    queues = qs("b:0-3")
    assert shares("config", queues, ["c0", "c1"], allocationConfig=queues) == "0 1 2 3 / 0 1 2 3"
    by_consumer = {"c0": ["T/b/3", "T/b/0"], "c1": {"T": {"b": [1]}}}
    assert shares("config", queues, ["c0", "c1", "c2"], allocationConfig=by_consumer) == "3 0 / 1 / -"


def test_config_skips_missing_queues_and_shares_retry_topics() -> None:
    config = {"allocationConfig": ["T/b/0", "T/b/9", "U/b/0"]}
    assert allocate("config", "c0", qs("b:0-3"), ["c0", "c1"], **config) == qs("b:0")
    retries = qs("b:0-1", "%RETRY%g")
    assert allocate("config", "c1", retries, ["c0", "c1"], **config) == retries[1:]
    with pytest.raises(OptionError, match="'allocationConfig' is missing"):
        allocate("config", "c0", qs("b:0"), ["c0"])


def test_machine_room_takes_the_remainder_from_the_tail() -> None:
    queues = qs("hz@b1:0-3 hz@b2:0-2 sh@b3:0-2 bj@b4:0-3 plain:0-1 hz@x@y:0-1 hz@:0-1")
    found = allocate_all("machineRoom", queues, ["c0", "c1", "c2"], machineRooms=["hz", "sh"])
    assert [names(share) for share in found.values()] == [
        "hz@b1:0 hz@b1:1 hz@b1:2 sh@b3:2",
        "hz@b1:3 hz@b2:0 hz@b2:1",
        "hz@b2:2 sh@b3:0 sh@b3:1",
    ]
    two = [*qs("room1@broker-a:0-4"), *qs("room2@broker-b:5-9")]
    assert shares("machineRoom", two, ["c0", "c1"], machineRooms="room1") == "0 1 4 / 2 3"
    assert shares("machineRoom", qs("hz@b1:0-1"), ["c0", "c1", "c2"], machineRooms=["hz"]) == "0 / 1 / -"
    assert shares("machineRoom", qs("hz@b1:0-1"), ["c0"], machineRooms=["gz"]) == "-"
    with pytest.raises(OptionError, match="'machineRooms' is missing"):
        allocate("machineRoom", "c", queues, ["c"])


def test_retry_queues_of_other_rooms_are_read_by_someone() -> None:
    """What its broker does not take back is copied to another one, of whatever room: it would come to nobody."""
    retries = qs("hz@a:0-1 sh@b:0-1 plain:0", "%RETRY%g")
    found = allocate_all("machineRoom", retries, ["c0", "c1"], machineRooms="hz")
    assert [names(share) for share in found.values()] == ["hz@a:0 plain:0 sh@b:0", "hz@a:1 sh@b:1"]


NEARBY = [
    (
        "averagely", "IDC1-b:0-3 IDC2-b:0-3 IDC3-b:0-3", "IDC1-c0 IDC1-c1 IDC2-c0",
        ["IDC1-b:0 IDC1-b:1 IDC3-b:0 IDC3-b:1", "IDC1-b:2 IDC1-b:3 IDC3-b:2",
         "IDC2-b:0 IDC2-b:1 IDC2-b:2 IDC2-b:3 IDC3-b:3"],
    ),
    (
        "averagely", "IDC1-b:0-2 IDC2-b:0-4", "IDC1-c0 IDC1-c1 IDC2-c0 IDC3-c0",
        ["IDC1-b:0 IDC1-b:1", "IDC1-b:2", "IDC2-b:0 IDC2-b:1 IDC2-b:2 IDC2-b:3 IDC2-b:4", ""],
    ),
    (
        "averagelyByCircle", "IDC1-b:0-3 IDC3-b:0-3 IDC4-b:0-1", "IDC1-c0 IDC1-c1 IDC2-c0",
        ["IDC1-b:0 IDC1-b:2 IDC3-b:0 IDC3-b:3 IDC4-b:0", "IDC1-b:1 IDC1-b:3 IDC3-b:1 IDC4-b:1", "IDC3-b:2"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("inner", "queues", "consumers", "expected"), NEARBY)
def test_machine_room_nearby(inner: str, queues: str, consumers: str, expected: list[str]) -> None:
    found = allocate_all("machineRoomNearby", qs(queues), consumers.split(), inner=inner, room=before_dash)
    assert [names(share) for share in found.values()] == expected


def test_nearby_takes_rooms_of_partitions_from_a_mapping() -> None:
    rooms = {"p0": "hz", "p1": "sh"}
    found = allocate_all("machineRoomNearby", qs("hz@a:0-1 sh@b:0"), ["p0", "p1"], partitionRooms=rooms)
    assert [names(share) for share in found.values()] == ["hz@a:0 hz@a:1", "sh@b:0"]
    for broken, text in (({"p0": "hz"}, "consumer id p1"), ({"p0": "hz", "p1": ""}, "consumer id p1")):
        with pytest.raises(OptionError, match=f"Machine room is null for {text}"):
            allocate("machineRoomNearby", "p0", qs("hz@a:0"), ["p0", "p1"], partitionRooms=broken)
    with pytest.raises(OptionError, match="Machine room is null for mq T/plain/0"):
        allocate("machineRoomNearby", "p0", qs("plain:0"), ["p0", "p1"], partitionRooms=rooms)
    with pytest.raises(OptionError, match="'partitionRooms' is missing"):
        allocate("machineRoomNearby", "p0", qs("hz@a:0"), ["p0"])


@pytest.mark.parametrize(("number", "queue"), [(1, "a:0"), (3, "a:2"), (5, "b:0")])
def test_environment_takes_only_its_own_queue(number: int, queue: str) -> None:
    assert names(allocate("environment", "c", qs("a:0-3 b:0-3"), ["c"], environment=number)) == queue


def test_environment_out_of_range_is_a_clear_error() -> None:
    with pytest.raises(OptionError, match="option 'environment' is 9; expected a whole number from 1 to 8"):
        allocate("environment", "c", qs("a:0-3 b:0-3"), ["c"], environment=9)
    with pytest.raises(OptionError, match="option 'environment' is None"):
        allocate("environment", "c", qs("a:0"), ["c"])


def test_clients_of_environment_share_queues_without_duplicates() -> None:
    queues = qs("a:0-3 b:0-3")
    two = allocate_all("environment", queues, ["c0", "c1"], environment=2, environments=4)
    assert [names(share) for share in two.values()] == ["a:1", "b:1"]
    one_queue = allocate_all("environment", queues, ["c0", "c1"], environment=3)
    assert [names(share) for share in one_queue.values()] == ["a:2", ""]
    mixed = allocate_all(
        "environment", queues, ["x@1", "y@2", "z@1"], environment=1, environments=2,
        environmentOf=lambda c: c.split("@")[1],
    )  # fmt: skip
    assert [names(share) for share in mixed.values()] == ["a:0 a:2", "", "b:0 b:2"]


def test_retry_topic_has_no_environments_and_is_read_by_someone() -> None:
    retries = qs("a:0 b:0", "%RETRY%g")
    found = allocate_all("environment", retries, ["c0", "c1"], environment=5)
    assert [names(share) for share in found.values()] == ["a:0", "b:0"]


def first_to_everyone(consumer: str, queues: list[MessageQueue], consumers: list[str], **config: Any) -> Any:
    return queues[: config.get("take", 1)]


def test_a_callable_or_its_name_is_a_strategy() -> None:
    assert shares(first_to_everyone, qs("b:0-3"), ["c0", "c1"]) == "0 / 0"
    assert shares(f"{__name__}:first_to_everyone", qs("b:0-3"), ["c0", "c1"], take=2) == "0 1 / 0 1"
    with pytest.raises(OptionError, match="which is not among the queues"):
        allocate(lambda consumer, queues, consumers: qs("z:0"), "c", qs("b:0"), ["c"])
    with pytest.raises(OptionError, match="mqAll is null"):
        allocate(first_to_everyone, "c", [], ["c"])


def test_wrong_names_get_an_offer() -> None:
    with pytest.raises(OptionError, match=r"'allocationStrategy' is 'averagly'; .* did you mean 'averagely'"):
        allocate("averagly", "c", qs("b:0"), ["c"])
    with pytest.raises(OptionError, match=r"'virtualNode'; .* did you mean 'virtualNodes'"):
        allocate("consistentHash", "c", qs("b:0"), ["c"], virtualNode=3)
    assert allocate("AVERAGELYbycircle", "c", qs("b:0"), ["c"]) == qs("b:0")


@pytest.mark.parametrize("strategy", ["averagely", "averagelyByCircle", "consistentHash"])
def test_arguments_are_checked_in_javas_order(strategy: str) -> None:
    for consumer, queues, consumers, text in (
        ("", [], [], "currentCID is empty"),
        ("c", [], [], "mqAll is null or mqAll empty"),
        ("c", qs("b:0"), [], "cidAll is null or cidAll empty"),
    ):
        with pytest.raises(ValueError, match=text):
            allocate(strategy, consumer, queues, consumers)
    assert allocate(strategy, "absent", qs("b:0"), ["c"]) == []


queue_lists = st.lists(
    st.builds(MessageQueue, st.sampled_from(["T", "U"]), st.sampled_from(["a", "b10", "b9"]), st.integers(0, 9)),
    min_size=1,
    unique=True,
)
consumer_lists = st.lists(st.sampled_from([f"c{i}" for i in range(9)]), min_size=1, unique=True)


@settings(deadline=None)
@given(st.sampled_from(["averagely", "averagelyByCircle", "consistentHash"]), queue_lists, consumer_lists)
def test_every_queue_has_exactly_one_owner(strategy: str, queues: list[MessageQueue], consumers: list[str]) -> None:
    found = allocate_all(strategy, queues, consumers)
    assert Counter(queue for share in found.values() for queue in share) == Counter(queues)
    assert {c: allocate(strategy, c, queues, consumers) for c in consumers} == found


def test_allocation_time_is_not_quadratic_in_cluster_size() -> None:
    """With ten thousand queues at a hundred consumers, as a large cluster has them."""

    def planned_s(times: int) -> float:
        queues = [MessageQueue(f"t{t}", f"b{b}", i) for t in range(125 * times) for b in range(2) for i in range(4)]
        consumers = [f"partition-{i:05}" for i in range(10 * times)]
        start = time.process_time()
        for strategy in ("averagely", "averagelyByCircle", "consistentHash"):
            allocate_all(strategy, queues, consumers)
        return time.process_time() - start

    planned_s(1)  # what is made once
    ratio = planned_s(10) / planned_s(1)
    print(f"{ratio:.1f} times as long")
    assert ratio < 50
    assert set(STRATEGIES) >= {"averagely", "averagelyByCircle", "consistentHash"}


def test_consumers_are_in_the_order_of_javas_strings() -> None:
    """Which compares their halves where a character has two."""
    members = ["\uff5e", "\U0001f600", "a"]
    assert {name: allocate("averagely", name, qs("a:0-2"), members) for name in members} == {
        "a": qs("a:0"),
        "\U0001f600": qs("a:1"),
        "\uff5e": qs("a:2"),
    }


def test_several_environments_share_all_retry_topic_queues() -> None:
    queues, members = qs("a:0-3", "%RETRY%g"), ["1@dev", "2@dev", "1@test", "2@test"]
    config: dict[str, Any] = {"environments": {"dev": [0], "test": [1]}, "environmentOf": lambda c: c.split("@")[1]}
    shares = [
        allocate("environment", each, queues, members, environment=each.split("@")[1], **config) for each in members
    ]
    assert sorted(queue for share in shares for queue in share) == queues
