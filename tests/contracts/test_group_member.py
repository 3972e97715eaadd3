"""``ports.GroupMember``: the remoting client on a real broker, and the members in memory of the consumers' tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import LocalProtocolError, RocketMQError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import NO_FILTER, Filter, PullRequest, PullStatus
from rocketmq_spark.model.membership import Membership
from tests.contracts.members import Case, OfGroup, OfQueues, Outcome, Real, messages_of, soon, times

ALL = (pytest.param("real", marks=pytest.mark.needs("rocketmq")), "of a group", "of queues")
FOREVER_MS = 1 << 60


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "real":
        mq: LocalBroker = request.getfixturevalue("rocketmq")
        make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
        return Real(mq, make_topic(queues=2))
    return OfGroup() if request.param == "of a group" else OfQueues()


every = pytest.mark.parametrize("case", ALL, indirect=True)


@every
def test_a_pull_gives_what_there_is_and_where_to_go_on(case: Case) -> None:
    case.send(b"0", b"1", b"2")
    answer = case.pulled(1)
    assert [message.body for message in messages_of(answer)] == [b"1", b"2"]
    assert (answer.status, answer.next_offset, answer.min_offset, answer.max_offset) == (PullStatus.FOUND, 3, 0, 3)
    assert [message.queue_offset for message in messages_of(case.pulled(0, count=2))] == [0, 1]


@every
def test_a_pull_at_the_end_is_answered_once_and_late(case: Case) -> None:
    case.send(b"0")
    found = case.outcomes(1, suspend_s=15.0)
    assert found == []
    case.send(b"1")
    case.awaited(lambda: found, 10)
    case.send(b"2")
    assert [[message.body for message in messages_of(answer)] for answer in found] == [[b"1"]]  # type: ignore[arg-type]


@every
@pytest.mark.parametrize("count", [0, 3])
def test_a_pull_past_the_end_is_told_the_end(case: Case, count: int) -> None:
    case.send(*(b"%d" % i for i in range(count)))
    answer = case.pulled(7)
    assert (answer.status, answer.next_offset, list(messages_of(answer))) == (PullStatus.OFFSET_ILLEGAL, count, [])


@every
def test_a_pull_below_the_minimum_is_told_the_minimum(case: Case) -> None:
    case.send(*(b"%d" % i for i in range(3)))
    answer = case.pulled(case.below())
    assert (answer.status, list(messages_of(answer))) == (PullStatus.OFFSET_ILLEGAL, [])
    assert answer.next_offset == answer.min_offset == case.port.bounds(case.queue, soon()).min_offset


@every
def test_young_queue_without_offset_starts_at_zero_by_default(case: Case) -> None:
    case.send(b"0", b"1")
    assert case.port.committed(case.group, case.queue, soon()) == 0
    assert case.port.committed(case.group, case.queue, soon(), zero_if_new=False) is None


@every
def test_a_group_that_no_operator_switched_pulls(case: Case) -> None:
    topic, broker = case.queue.topic, case.queue.broker_name
    assert case.port.consume_modes(case.group, [topic, "no-such-topic"], soon()) == {(topic, broker): "PULL"}


@every
def test_offsets_are_each_queues_own(case: Case) -> None:
    case.send(b"0", b"1")
    leave = case.join(case.port)
    assert case.port.commit(case.group, {case.queue: 2}, soon()) == {}
    assert case.port.committed(case.group, case.queue, soon()) == 2
    assert case.port.committed(case.group, case.other, soon(), zero_if_new=False) is None
    assert case.port.commit(case.group, {case.queue: 1}, soon()) == {}
    assert case.port.committed(case.group, case.queue, soon()) == 1
    leave(soon())


@every
def test_group_without_members_or_pulls_can_commit_offsets(case: Case) -> None:
    assert case.port.committed(case.group, case.queue, soon(), zero_if_new=False) is None
    assert case.port.commit(case.group, {case.queue: 0}, soon()) == {}
    assert case.port.committed(case.group, case.queue, soon(), zero_if_new=False) == 0


@every
def test_times_are_looked_up_within_the_queue(case: Case) -> None:
    case.send(b"0", b"1")
    assert [case.port.search_offset(case.queue, at, soon()) for at in (0, FOREVER_MS)] == [0, 2]
    assert case.port.search_offset(case.other, 0, soon()) == 0


@every
def test_a_topic_that_is_not_there_has_no_queues(case: Case) -> None:
    assert case.port.queues(case.queue.topic, soon()) == case.port.queues(case.queue.topic, soon())
    assert list(case.port.queues(case.queue.topic, soon())) == [case.queue, case.other]
    with pytest.raises(RouteNotFound):
        case.port.queues("no-such-topic", soon())


@every
def test_pull_of_missing_queue_or_topic_is_refused(case: Case) -> None:
    """Other questions are answered as if it were empty."""
    case.send(b"0")
    for absent, code in (
        (case.queue._replace(queue_id=99), Response.INVALID_PARAMETER),
        (case.queue._replace(topic="no-such-topic"), Response.TOPIC_NOT_EXIST),
    ):
        found = case.outcomes(0, absent)
        case.awaited(lambda found=found: found, 20)
        assert [getattr(outcome, "broker_code", None) for outcome in found] == [code]
        bounds = case.port.bounds(absent, soon())
        assert (bounds.min_offset, bounds.max_offset) == (0, 0)
        assert case.port.search_offset(absent, 0, soon()) == 0


@every
def test_filter_without_match_moves_offset_past_checked_messages(case: Case) -> None:
    case.send(b"0", b"1")
    answer = case.pulled(0, filter=Filter("rare", "TAG"))
    assert (answer.status, answer.next_offset, list(messages_of(answer))) == (PullStatus.NO_MATCHED_MSG, 2, [])


@every
def test_members_and_filters_of_memberless_group_are_errors(case: Case) -> None:
    for verb in (case.port.members, case.port.filters):
        with pytest.raises(RocketMQError):
            verb(case.group, case.queue.topic, soon())


@every
def test_a_group_has_one_member_in_a_process_until_it_leaves(case: Case) -> None:
    leave = case.join(case.port)
    with pytest.raises(LocalProtocolError):
        case.join(case.port)
    assert list(case.port.members(case.group, case.queue.topic, soon())) == [case.port.client_id]
    leave(soon())
    leave = case.join(case.port)
    leave(soon())


@every
def test_members_know_each_other_and_what_the_group_wants(case: Case) -> None:
    other = case.another()
    leaves = [case.join(port) for port in (case.port, other)]
    ids = sorted([case.port.client_id, other.client_id])
    assert sorted(case.port.members(case.group, case.queue.topic, soon())) == ids
    assert case.port.filters(case.group, case.queue.topic, soon()) == {case.queue.topic: NO_FILTER}
    leaves[1](soon())
    case.awaited(lambda: list(case.port.members(case.group, case.queue.topic, soon())) == [case.port.client_id], 20)
    leaves[0](soon())


@every
def test_sent_back_message_returns_with_brokers_own_retry_count(case: Case) -> None:
    """Whatever who sends it back believes."""
    leave = case.join(case.port)
    case.send(b"0", b"1")
    for message in case.messages():
        case.port.send_back(case.group, dataclasses.replace(message, reconsume_times=7), 1, 16, soon())
    again = case.come_again(2)
    assert times(again) == {(b"0", 1): 1, (b"1", 1): 1}
    for message in again:
        case.port.send_back(case.group, message, 1, 16, soon())
    assert times(case.come_again(4)) == {(b"0", 1): 1, (b"1", 1): 1, (b"0", 2): 1, (b"1", 2): 1}
    leave(soon())


@every
def test_message_is_dead_letter_at_retry_limit_or_on_request(case: Case) -> None:
    leave = case.join(case.port)
    case.send(b"0", b"1")
    first, second = case.messages()
    case.port.send_back(case.group, first, -1, 16, soon())
    assert case.dead() == [b"0"]
    case.port.send_back(case.group, second, 1, 1, soon())
    (again,) = case.come_again(1)
    case.port.send_back(case.group, again, 1, 1, soon())
    case.awaited(lambda: case.dead() == [b"0", b"1"], 20)
    leave(soon())


@every
def test_a_copy_is_a_dead_letter_once_it_came_often_enough(case: Case) -> None:
    """Who sends it says how often that was; its broker knows nothing of attempts in place."""
    leave = case.join(case.port)
    case.send(b"0", b"1")
    first, second = case.messages()
    case.port.send_to_retry(case.group, dataclasses.replace(first, reconsume_times=1), 1, soon())
    assert case.dead() == [b"0"]
    case.port.send_to_retry(case.group, second, 1, soon())  # after the shortest of the delays
    assert times(case.come_again(1)) == {(b"1", 1): 1}
    leave(soon())


@every
def test_retry_copy_from_group_with_locks_is_dead_letter_at_once(case: Case) -> None:
    leave = case.join(case.port)
    case.send(b"0")
    assert case.port.lock(case.group, [case.queue], soon()) == {case.queue}
    case.port.send_to_retry(case.group, *case.messages(), 16, soon())
    assert case.dead() == [b"0"]
    leave(soon())


@every
def test_pull_by_filter_newer_than_heartbeat_is_refused(case: Case) -> None:
    wants = Membership({case.queue.topic: NO_FILTER}, {case.queue.topic: 5})
    leave = case.port.join(case.group, lambda: wants, lambda address, question: None, 30.0)
    case.port.heartbeat(soon())

    def code(version_ms: int) -> int | None:
        found: list[Outcome] = []
        at = version_ms  # and the offset that it tells
        asked = PullRequest(case.group, case.queue, at, version_ms=version_ms, suspend_s=0.0, commit_offset=at)
        case.port.pull(asked, soon(), found.append)
        case.awaited(lambda: found, 20)
        return found[0].broker_code if isinstance(found[0], RocketMQError) else None

    assert [code(version) for version in (4, 5, 6)] == [None, None, Response.SUBSCRIPTION_NOT_LATEST]
    assert case.port.committed(case.group, case.queue, soon(), zero_if_new=False) == 5, "what was refused told nothing"
    leave(soon())


@every
def test_queue_lock_belongs_to_one_member_until_it_unlocks(case: Case) -> None:
    other = case.another()
    leaves = [case.join(port) for port in (case.port, other)]
    both = [case.queue, case.other]
    assert case.port.lock(case.group, both[:1], soon()) == {case.queue}
    assert other.lock(case.group, both, soon()) == {case.other}
    assert case.port.lock(case.group, both, soon()) == {case.queue}  # again, which it has already
    other.unlock(case.group, both, soon())
    assert other.lock(case.group, both, soon()) == {case.other}
    case.port.unlock(case.group, both, soon())
    assert other.lock(case.group, both, soon()) == set(both)
    other.unlock(case.group, both, soon())
    for leave in leaves:
        leave(soon())
