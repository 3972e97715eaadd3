from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.errors import BrokerNotFound, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import parse
from rocketmq_spark.queues.environment import (
    Environment,
    EnvironmentQueues,
    _warn_of_position,
    check_environment_set,
    environment_of,
    environment_of_group,
    owners,
    suffix_of,
)
from tests.queues import names, qs

EIGHT = qs("b:0-3 a:0-3")


@pytest.mark.parametrize(("number", "queue"), [(1, "a:0"), (3, "a:2"), (5, "b:0"), ("8", "b:3")])
def test_environment_n_owns_the_nth_queue(number: Any, queue: str) -> None:
    assert names(Environment.of(number).owned(EIGHT)) == queue


def test_number_out_of_range_names_option_value_and_expectation() -> None:
    with pytest.raises(OptionError, match="option 'environment' is 9; expected a whole number from 1 to 8, the number"):
        Environment.of(9).owned(EIGHT)


@pytest.mark.parametrize("value", [0, -1, "x", "", None, 1.5, True])
def test_what_is_no_number_at_all_is_refused_at_once(value: Any) -> None:
    with pytest.raises(OptionError, match=r"option 'environment' is .*; expected a whole number of at least 1"):
        Environment.of(value)


def test_known_count_gives_environment_queues_of_every_broker() -> None:
    shares = [names(Environment.of(n, 4).owned(EIGHT)) for n in (1, 2, 3, 4)]
    assert shares == ["a:0 b:0", "a:1 b:1", "a:2 b:2", "a:3 b:3"]
    assert names(Environment.of("2", "2").owned(EIGHT)) == "a:1 a:3 b:1 b:3"


def test_a_count_does_not_shift_when_a_broker_is_away() -> None:
    assert names(Environment.of(2, 4).owned(qs("b:0-3"))) == "b:1"


def test_a_count_is_checked_against_number_and_queues() -> None:
    with pytest.raises(OptionError, match="option 'environment' is 5; expected a whole number from 1 to 4"):
        Environment.of(5, 4)
    with pytest.raises(OptionError, match="option 'environments' is 8; expected at most 4, the queues of a broker"):
        Environment.of(8, 8).owned(EIGHT)


def test_names_with_queues_on_every_broker_or_by_broker() -> None:
    layout = '{"dev1": [0, 1], "dev2": {"a": [2], "b": [3]}, "dev3": {"b": [2]}}'
    assert names(Environment.of("dev1", layout).owned(EIGHT)) == "a:0 a:1 b:0 b:1"
    assert names(Environment.of("dev2", layout).owned(EIGHT)) == "a:2 b:3"
    with pytest.raises(OptionError, match="option 'environment' is 'prod'; expected one of dev1, dev2, dev3"):
        Environment.of("prod", layout)
    with pytest.raises(OptionError, match="gives 'dev3' the queues b:2; topic 'T' has none of them"):
        Environment.of("dev3", layout).owned(qs("a:0-3"))


@pytest.mark.parametrize(
    "layout", ["", "0", "x", 0, True, "{", "{}", '{"a": []}', '{"a": 1}', '{"a": ["0"]}', '{"a": [-1]}', [1]]
)
def test_a_layout_that_is_none_is_refused(layout: Any) -> None:
    with pytest.raises(OptionError, match=r"option 'environments' is .*; expected a count, or JSON such as"):
        Environment.of("a", layout)


@pytest.mark.parametrize(
    "layout",
    [{"d1": [0], "d2": [0]}, {"d1": [0], "d2": {"a": [0]}}, {"d1": {"a": [1]}, "d2": {"a": [0, 1]}}],
)
def test_no_queue_may_belong_to_two_environments(layout: Any) -> None:
    with pytest.raises(OptionError, match="expected each queue to belong to one environment"):
        Environment.of("d1", layout)
    assert Environment.of("d1", {"d1": {"a": [1]}, "d2": {"b": [1]}}).owned(qs("a:1 b:1")) == qs("a:1")


def test_each_topic_is_looked_at_by_itself() -> None:
    both = [*qs("a:0-1", "T1"), *qs("a:0-1", "T2")]
    assert Environment.of(2).owned(both) == [*qs("a:1", "T1"), *qs("a:1", "T2")]
    with pytest.raises(OptionError, match="from 1 to 1, the number of queues of topic 'T2'"):
        Environment.of(2).owned([*qs("a:0-1", "T1"), *qs("a:0", "T2")])


@pytest.mark.parametrize("layout", [None, 8, {"5": {"b": [0]}, "1": {"a": [0]}}])
def test_read_and_write_queues_agree_if_one_broker_is_read_only(layout: Any) -> None:
    queues = qs("a:0-7 b:0-7") if layout == 8 else EIGHT
    environment = Environment.of(5, layout)
    writable = [queue for queue in queues if queue.broker_name == "b"]
    read, written = environment.owned(queues), environment.writable_queues(queues, writable)
    assert written
    assert set(written) <= set(read)


@pytest.mark.parametrize("number", [1, 5])
def test_environment_by_position_keeps_queues_if_route_changes(number: int) -> None:
    environment = Environment.of(number)
    kept = environment.owned(EIGHT)
    mine = [queue for queue in kept if queue.broker_name == "b"]
    assert environment.owned(qs("b:0-3"), kept) == mine
    assert environment.owned(EIGHT, kept) == kept
    assert environment.owned(qs("b:0-3", "U"), kept, {"U"}) == environment._queues_of_topic(qs("b:0-3", "U"))


def test_layouts_without_positions_ignore_previous_queues() -> None:
    assert names(Environment.of(2, 4).owned(EIGHT, qs("a:0"))) == "a:1 b:1"
    layout = {"x": {"a": [0]}}
    assert Environment.of("x", layout).owned(qs("b:0-3"), (), {"T"}) == []
    with pytest.raises(OptionError, match="topic 'T' has none of them"):
        Environment.of("x", layout).owned(qs("b:0-3"), qs("a:0"))


def test_environment_without_writable_queue_raises_error() -> None:
    with pytest.raises(BrokerNotFound, match="environment '1' owns T/a/0, none of which takes messages now; a cannot"):
        Environment.of(1).writable_queues(EIGHT, qs("b:0-3"))
    with pytest.raises(OptionError, match=r"environment '1' owns T/a/0, none of which takes messages now$"):
        Environment.of(1).writable_queues(EIGHT, qs("a:1-3 b:0-3"))  # its broker is there, and takes none in this queue


def test_environment_broker_missing_from_route_is_retriable() -> None:
    mine = Environment.of("x", {"x": {"a": [0], "c": [0]}, "y": {"b": [0]}})
    with pytest.raises(BrokerNotFound, match="topic 'T' has none of them; a, c cannot accept messages now") as e:
        mine.writable_queues(qs("b:0"), qs("b:0"))
    assert e.value.retriable
    assert mine.writable_queues(qs("a:0 b:0"), qs("a:0 b:0")) == qs("a:0")
    with pytest.raises(OptionError, match="gives 'z' the queues b:9; topic 'T' has none of them"):
        Environment.of("z", {"z": {"b": [9]}}).writable_queues(qs("b:0"), qs("b:0"))


def test_an_environment_that_is_a_number_alone_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_position.cache_clear()
    for given in ({"environment": 3}, {"environment": 3}, {"environment": 1, "environments": 4}):
        found = environment_of(parse(given))
        assert found is not None
        assert found.number == given["environment"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "option 'environment' is 3 without option 'environments'" in line
    assert "Set option 'environments' to the number of environments" in line


def test_environments_need_the_one_to_use() -> None:
    with pytest.raises(OptionError, match="option 'environments' needs option 'environment'"):
        environment_of(parse({"environments": "3"}))


def test_environment_members_have_own_group_and_queues() -> None:
    one = Environment.of("dev", {"dev": [0], "test": [1]})
    assert one.group("billing") == "billing_env_dev"
    assert names(EnvironmentQueues(one)(EIGHT)) == "a:0 b:0"
    retries = qs("a:0-1 b:1", "%RETRY%billing_env_dev")
    assert EnvironmentQueues(one)(retries) == retries
    assert EnvironmentQueues(None)(EIGHT) == EIGHT
    assert EnvironmentQueues(one)([]) == []


def test_queues_that_members_had_by_position_stay_theirs(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the topic was made again elsewhere: the log says once that nothing is read."""
    own = EnvironmentQueues(Environment.of(1))
    for _ in range(2):
        assert names(own(EIGHT)) == "a:0"
        caplog.clear()
        assert own(qs("b:0-3")) == own(qs("b:0-3")) == []
        (said,) = caplog.messages
        assert said.startswith(
            "environment 1, a number alone, had T/a/0. Topic T lacks its queues of the environment now"
        )
    assert names(own(EIGHT)) == "a:0"


@pytest.mark.parametrize("environments", [None, "2", "3", '{"dev": [0, 2], "test": {"b": [1]}}'])
def test_owners_are_those_that_own_the_queues(environments: str | None) -> None:
    found = owners(reversed(EIGHT), environments)
    for name in set(found.values()):
        assert [q for q in sorted(EIGHT) if found.get(q) == name] == Environment.of(name, environments).owned(EIGHT)
    assert len(found) == (5 if environments and "dev" in environments else 8)


def test_a_group_tells_its_environment() -> None:
    assert environment_of_group(Environment.of(2).group("g_env_x")) == "2"
    assert environment_of_group("billing") is None


SUFFIX = {"environmentMode": "suffix"}


def test_with_a_suffix_all_queues_are_used() -> None:
    assert environment_of(parse({**SUFFIX, "environment": "dev"})) is None
    assert suffix_of(parse({**SUFFIX, "environment": "dev"})) == "dev"
    assert suffix_of(parse({"environment": "1"})) == ""


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (SUFFIX, "option 'environmentMode' is 'suffix', which needs option 'environment'"),
        (
            {**SUFFIX, "environment": "dev", "environments": "3"},
            "option 'environments' divides the queues of a topic",
        ),
        ({**SUFFIX, "environment": "dév"}, "option 'environment' is 'dév'; expected only letters, digits"),
        (
            {**SUFFIX, "environment": "eu_dev"},
            "option 'environment' is 'eu_dev'.*end with the environment, after a '_'",
        ),
    ],
)
def test_what_a_suffix_cannot_be_is_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        environment_of(parse(given))


@pytest.mark.parametrize("given", [{}, {"environmentMode": "suffix"}])
def test_bad_name_from_the_variable_names_the_variable(given: dict[str, str]) -> None:
    parsed = parse({**given}, {"ROCKETMQ_ENVIRONMENT": "ä"})
    with pytest.raises(OptionError, match="variable ROCKETMQ_ENVIRONMENT is 'ä'; expected"):
        environment_of(parsed)


@pytest.mark.parametrize(
    ("given", "problem"),
    [({}, "needs option 'environment'"), ({**SUFFIX, "environment": "dev"}, "has topics of its own: omit it")],
)
def test_selector_by_environment_needs_environment_with_queues(given: dict[str, str], problem: str) -> None:
    with pytest.raises(OptionError, match=f"option 'queueSelector' is 'environment', which .*{problem}"):
        check_environment_set(parse(given), "queueSelector")


@pytest.mark.parametrize("prefix", ["%RETRY%", "%DLQ%"])
def test_group_s_own_topics_are_not_shared_out(prefix: str) -> None:
    queues = [MessageQueue(f"{prefix}g_env_2", "a", 0)]
    assert Environment.of(2, 3).owned(queues) == queues
