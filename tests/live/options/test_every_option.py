"""Each row of the table of options has a test of its effect, for everyone who may give it.

For sources it is called ``test_<field>__<what>`` and lies in this folder; where a connection is used for writing, in
``test_writing.py``, whose tests run for the sink and for the producer; for the rest of the producer's rows in
``test_producing.py``. The sink's other rows have theirs among the tests of the sink: ``SINK``. A pull consumer's rows are
given in ``tests/live/consumer/test_pull_consumer.py``; its connections are those of the others (``session.client``).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rocketmq_spark.options import ROLES, SOURCE_ROLES, TABLE, Option

HERE = Path(__file__).parent
SINK = {
    "machine_rooms": "test_task::test_machine_room_uses_the_brokers_of_the_room",
    "environment": "test_task::test_environment_is_never_left",
    "environments": "test_task::test_environment_is_never_left",
    "topic": "test_task::test_round_robin_spreads_batches_evenly",
    "queue_selector": "test_task::test_hash_through_the_sink_is_the_java_clients_queue",
    "send_timeout": "test_outage::test_when_the_time_is_over_the_task_fails_with_the_cause",
    "max_message_size": "test_task::test_max_message_size_bounds_batches_too",
    "send_latency_fault": "test_outage::test_send_latency_fault_spares_a_frozen_broker",
    "latency_max": "test_outage::test_faulty_broker_is_avoided_for_the_configured_duration",
    "not_available_duration": "test_outage::test_faulty_broker_is_avoided_for_the_configured_duration",
    "auto_batch": "test_task::test_auto_batch_off_sends_every_row_alone",
    "batch_max_bytes": "test_task::test_round_robin_spreads_batches_evenly",
    "batch_by_tag": "test_whole::test_tag_rows_share_a_batch_and_queue_rows_keep_their_order",
    "total_batch_max_bytes": "test_task::test_a_fixed_number_and_the_total_bound_what_is_under_way",
    "max_in_flight": "test_task::test_a_fixed_number_and_the_total_bound_what_is_under_way",
    "compress_above": "test_task::test_what_travels_alone_is_compressed",
    "compression": "test_task::test_compression_none_and_batches_are_not_compressed",
    "require_store_ok": "test_outage::test_require_store_ok_asks_again_and_does_not_take_less",
    "long_delay": "test_long_delay::test_rows_of_the_sink_go_the_same_ways",
    "on_send_failure": "test_spooling::test_rows_for_busy_brokers_are_spooled_then_sent_by_worker",
    "spool_dir": "test_spooling::test_rows_for_busy_brokers_are_spooled_then_sent_by_worker",
    "spool_sync": "test_spooling::test_rows_for_busy_brokers_are_spooled_then_sent_by_worker",
    "spool_max_bytes": "test_spooling::test_task_fails_as_without_a_spool_beyond_spool_max_bytes",
    "delivery_guarantee": "test_once::test_a_batch_that_was_begun_sends_what_is_not_stored",
    "topic_names": "test_once::test_names_with_dots_have_the_ids_of_rocketmqs_names",
    "allowed_topics": "test_once::test_allowed_topics_are_all_that_rows_may_name",
    "exactly_once_settle": "test_once::test_the_settle_time_is_waited_for",
    "empty_bodies": "test_task::test_rows_without_a_body_are_marked_if_wanted",
    "kafka_columns": "test_once::test_rows_with_kafkas_columns_are_stored_once",
    "message_id": "test_task::test_flags_keys_tags_and_row_ids_are_stored",
}
# A consumer's rows become settings (tests/consumer/test_settings.py), whose effects are tested in memory.
CONSUMER = {
    "allocation_strategy": "test_rebalance::test_or_by_circle",
    "allocation_config": "test_settings::test_strategies_come_with_their_configuration",
    "machine_rooms": "test_settings::test_strategies_come_with_their_configuration",
    "environment": "test_rebalancing::test_environment_limits_shared_queues_but_not_retry_queues",
    "environments": "test_settings::test_each_environment_has_a_group_of_its_own",
    "environment_mode": "test_settings::test_with_a_suffix_the_group_is_named_on_the_wire_alone",
    "group": "test_settings::test_ranges_are_checked_at_the_start",
    "pull_batch_size": "test_running::test_pulls_say_how_much_they_want",
    "consume_from_where": "test_ownership::test_new_group_begins_where_it_says_and_goes_on_from_there",
    "auto_commit": "test_orderly::test_manual_commit_ends_messages_and_rollback_repeats_them",
    "pull_threshold_for_queue": "test_running::test_every_bound_of_the_cache_stops_the_pulls",
    "model": "test_consumer::test_broadcasting_members_get_all_and_keep_offsets_in_files",
    "ordered": "test_orderly::test_batches_of_a_queue_come_one_after_the_other",
    "arrow": "test_arrow::test_listener_gets_answers_as_rows_and_offset_passes_them",
    "consume_thread_min": "test_running::test_so_many_threads_call_listeners",
    "consume_message_batch_max_size": "test_concurrent::test_listeners_get_slices_of_a_pull",
    "pull_batch_size_in_bytes": "test_running::test_pulls_say_how_much_they_want",
    "pull_interval": "test_pulling::test_an_interval_between_pulls_is_kept",
    "pull_time_delay_when_exception": "test_running::test_errors_are_waited_out_for_as_long_as_it_is_told",
    "pull_threshold_size_for_queue": "test_running::test_every_bound_of_the_cache_stops_the_pulls",
    "pull_threshold_for_topic": "test_pulling::test_bounds_of_a_topic_count_for_all_its_queues_together",
    "pull_threshold_size_for_topic": "test_running::test_bytes_of_a_topic_count_for_all_its_queues_together",
    "consume_concurrently_max_span": "test_running::test_every_bound_of_the_cache_stops_the_pulls",
    "max_reconsume_times": "test_orderly_dead::test_ordered_message_is_a_dead_letter_after_its_last_attempt",
    "suspend_current_queue_time": "test_running::test_an_ordered_queue_waits_for_as_long_as_it_is_told",
    "consume_timeout": "test_concurrent::test_message_of_a_hanging_listener_goes_to_the_retry_topic",
    "persist_consumer_offset_interval": "test_running::test_offsets_are_stored_as_often_as_it_is_told",
    "rebalance_interval": "test_rebalancing::test_balanced_member_looks_as_often_as_it_is_told",
    "post_subscription_when_pull": "test_pulling::test_filter_and_version_go_along",
    "answer_stacks": "test_answers::test_stacks_are_answered_only_if_the_member_agrees",
    "answer_direct_messages": "test_answers::test_a_listener_gets_nothing_directly_if_the_member_refuses",
    "local_offsets_dir": "test_consumer::test_broadcasting_members_get_all_and_keep_offsets_in_files",
}
# Of producers and consumers together, by the file below tests/.
SHARED = {
    "enable_trace": "live/producer/test_traces::test_traces_are_shown_by_rocketmqs_own_tool",
    "trace_topic": "live/producer/test_traces::test_a_topic_of_ones_own_has_the_traces_of_its_clients",
    "open_telemetry": "test_telemetry::test_a_trace_goes_from_a_producer_to_its_consumers",
}
# Options of producers that a test gives without room for them in its name.
UNNAMED = {
    "not_available_duration": "test_send_latency_fault__and_latency_max_avoid_slow_broker",
    "spool_max_bytes": "test_on_send_failure__and_spool_dir_and_spool_sync_keep_send",
}
# A producer repeats a send as often as ``retries`` and ``sendTimeout`` say. The rows are there for the commands, which read
# with the options of a producer: tests/cli/test_command.py. Where one writes it is the sink that asks again.
NOT_A_PRODUCERS = {"num_retries", "retry_interval"}
READS, CONNECTED, PRODUCED = "test_*.py", "test_writing.py", "test_producing.py"


def fields_of(pattern: str) -> set[str]:
    """The fields that the names of the tests of these files begin with."""
    text = "".join(path.read_text("utf-8") for path in HERE.glob(pattern) if pattern != READS or _reads(path))
    return set(re.findall(r"^def test_(\w+?)__\w+\(", text, re.MULTILINE))


def named(pattern: str) -> str:
    """The names of the tests of these files."""
    text = "".join(path.read_text("utf-8") for path in HERE.glob(pattern))
    return " ".join(re.findall(r"^def test_(\w+)\(", text, re.MULTILINE))


def _reads(path: Path) -> bool:
    return path.name not in (CONNECTED, PRODUCED)


def rows(*roles: str) -> list[Option]:
    return [row for row in TABLE if set(row.roles) & set(roles)]


@pytest.mark.parametrize("field", [row.field for row in rows(*SOURCE_ROLES)])
def test_has_a_test(field):
    assert field in fields_of(READS)


@pytest.mark.parametrize("row", rows("sink"), ids=lambda row: row.field)
def test_of_the_sink_has_a_test(row):
    if row.field in fields_of(CONNECTED):
        return
    module, name = SINK[row.field].split("::")
    source = (HERE.parents[1] / "sink" / f"{module}.py").read_text("utf-8")
    (test,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    assert row.name in (ast.get_source_segment(source, test) or ""), "it does not give the option"


@pytest.mark.parametrize("row", rows("producer"), ids=lambda row: row.field)
def test_of_the_producer_has_a_test(row):
    if row.field in UNNAMED:
        source = (HERE / PRODUCED).read_text("utf-8")
        (test,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == UNNAMED[row.field])
        text = "\n".join(source.splitlines()[test.decorator_list[0].lineno - 1 : test.end_lineno])
        assert row.name in text or row.field in text, "the test does not give the option"
    elif f"and_{row.field}_" not in named(PRODUCED):
        assert row.field in fields_of(CONNECTED) | fields_of(PRODUCED) | NOT_A_PRODUCERS | SHARED.keys()


@pytest.mark.parametrize(
    "field", [row.field for row in rows("pull consumer") if row.roles != ROLES and row.field != "group"]
)
def test_of_the_pull_consumer_has_a_test(field):
    """Each of these tests has a ``group`` of its own."""
    if field in SHARED:
        return
    text = (HERE.parent / "consumer" / "test_pull_consumer.py").read_text("utf-8")
    assert re.search(rf"(make|PullConsumer)\([^)]*\b{field}=", text), "no test gives the option"


def test_of_the_consumer_has_a_test():
    assert CONSUMER.keys() | SHARED.keys() == {row.field for row in rows("consumer") if row.roles != ROLES}
    for place in CONSUMER.values():
        module, name = place.split("::")
        assert f"def {name}(" in (HERE.parents[1] / "consumer" / f"{module}.py").read_text("utf-8"), place


@pytest.mark.parametrize("field", SHARED)
def test_of_several_kinds_has_a_test(field):
    """Which gives the option to each of them."""
    module, name = SHARED[field].split("::")
    source = (HERE.parents[1] / f"{module}.py").read_text("utf-8")
    (test,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    kinds = [role for role in ("producer", "consumer", "pull consumer") if field in {row.field for row in rows(role)}]
    assert (ast.get_source_segment(source, test) or "").count(f"{field}=") >= len(kinds)


def test_what_is_listed_is_needed():
    assert SINK.keys() == {row.field for row in rows("sink")} - fields_of(CONNECTED)
    assert not NOT_A_PRODUCERS - {row.field for row in rows("producer")}
    assert not NOT_A_PRODUCERS & fields_of(PRODUCED)
