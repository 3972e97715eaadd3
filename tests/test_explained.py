"""The one useful line of what PySpark raises; with real queries in tests/spark/test_errors.py."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import MessageRefused, OptionError, RouteNotFound
from rocketmq_spark.options.names import KAFKA_SOURCE_COLUMNS, kafka_column_hint
from rocketmq_spark.spark.monitoring.explain import explain

CAUSE = RouteNotFound("no such topic", "h:1", topic="t", remedy="Create it")
IN_A_TASK = f"""Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 3, in main
    process()
rocketmq_spark.errors.CallTimeout: [ROCKETMQ_TIMEOUT] no answer (at h:2)

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/rocketmq_spark/spark/sink/task.py", line 7, in write
    raise error from e
rocketmq_spark.errors.RouteNotFound: {CAUSE}

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:600)
Caused by: org.apache.spark.api.python.PythonException
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


def test_our_own_error_is_its_line():
    assert explain(CAUSE) == "[ROCKETMQ_ROUTE_NOT_FOUND] no such topic (at h:1, topic t). Create it"


def test_an_error_of_ours_that_something_else_came_from():
    error = RuntimeError("the job failed")
    error.__cause__ = ValueError("in between")
    error.__cause__.__context__ = MessageRefused("row 3: body is null")
    assert explain(error) == "[ROCKETMQ_MESSAGE_REFUSED] row 3: body is null"


def test_of_a_traceback_of_a_task_the_last_of_ours_counts():
    assert explain(RuntimeError(IN_A_TASK)) == str(CAUSE)


def test_several_problems_stand_in_one_line():
    text = f"[PYTHON_DATA_SOURCE_ERROR] failed: {OptionError.of(['a is wrong', 'b is, too'])} SQLSTATE: 38000\n\tat x"
    assert explain(RuntimeError(text)) == "[ROCKETMQ_OPTION] a is wrong; b is, too"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: rocketmq.", "Set PYSPARK_PYTHON"),
        ("ModuleNotFoundError: No module named 'pyarrow'", "Set PYSPARK_PYTHON"),
        ("x\nTask serialization failed: Illegal size 5 of collection, expected 6\n\tat y", "call register(spark)"),
        (
            "x\nCaused by: Class is not registered: org.apache.spark.sql.catalyst.util.ArrayBasedMapData\n\tat y",
            "call register(spark) before the query starts",
        ),
        (
            '[UNSUPPORTED_DATA_SOURCE_SAVE_MODE] The data source "rocketmq" cannot be written in the "ErrorIfExists" mode.',
            '.mode("append")',
        ),
        ("requirement failed: rocketmq does not support Update mode.", "foreachBatch(foreach_batch_writer(…))"),
        ("Data source rocketmq does not support continuous processing.", "Use trigger(processingTime=…)"),
        ("Python worker failed to connect back.", "Start the query again"),
    ],
)
def test_known_traps_have_their_remedy(text, remedy):
    line = explain(RuntimeError(text))
    assert remedy in line
    assert "\n" not in line


UNRESOLVED = (
    "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column, variable, or function parameter with name {name} cannot be resolved. "
    "Did you mean one of the following? [{near}]. SQLSTATE: 42703; line 1 pos 5;\n'Project ['key]\n{plan}"
)
RELATION = "+- ~StreamingRelationV2 org.apache.spark.sql.PythonDataSourceV2@1, rocketmq, [subscribe=a], [topic#1]"


@pytest.mark.parametrize("name", KAFKA_SOURCE_COLUMNS)
def test_a_column_of_kafka_is_translated(name):
    line = explain(RuntimeError(UNRESOLVED.format(name=f"`{name}`", near="`x`", plan=RELATION)))
    assert line.startswith("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column, variable, or function parameter with name")
    assert line.endswith(f"cannot be resolved: {kafka_column_hint(name).removeprefix('; ')}")


def test_a_topic_that_was_dropped_is_explained():
    line = explain(RuntimeError(UNRESOLVED.format(name="`topic`", near="`body`", plan=RELATION)))
    assert line.endswith(
        "cannot be resolved: the source has a column 'topic', unless option 'columns' omits it; keep it in each select"
    )


@pytest.mark.parametrize(
    ("name", "near", "plan", "translated"),
    [
        ("`o`.`Key`", "`x`", RELATION, True),
        ("`headers`.`key`", "`x`", RELATION, True),
        ("`key`.`id`", "`x`", RELATION, True),
        ("`key`", "`keys`, `body`, `msgId`", "", True),  # Spark Connect may show no plan
        ("`timestamp`", "`bornTimestamp`, `storeTimestamp`", "", True),
        ("`key`", "`id`, `name`", "+- Range (0, 1)", False),
        ("`keyz`", "`keys`", RELATION, False),
    ],
)
def test_only_columns_of_kafka_in_our_frames_are_translated(name, near, plan, translated):
    line = explain(RuntimeError(UNRESOLVED.format(name=name, near=near, plan=plan)))
    assert ("for Kafka's" in line) == translated
    assert ("Did you mean" in line) == (not translated)


@pytest.mark.parametrize(
    ("near", "plan"),
    [
        ("`value`", RELATION.replace("subscribe=a", "subscribe=a, kafkacolumns=true")),
        ("`value`, `topic`, `partition`, `offset`", ""),  # Spark Connect may show no plan
        ("`value`", RELATION.replace("[topic#1]", "[value#1, topic#2, timestampType#3]")),
    ],
)
def test_columns_of_kafka_are_not_advised_if_the_frame_has_them(near, plan):
    for name in ("key", "headers"):
        line = explain(RuntimeError(UNRESOLVED.format(name=f"`{name}`", near=near, plan=plan)))
        assert "kafkaColumns" not in line
        assert ("set option 'includeHeaders' = true" in line) == (name == "headers")
        assert f"keep {name!r} in each select" in line or f"the source has a column {name!r}" in line


AMONG = '[UNRESOLVED_COLUMN_AMONG_FIELD_NAMES] Cannot resolve column name "{}" among ({}). SQLSTATE: 42703'


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (AMONG.format("key", "body, topic, queueId"), "column name \"key\": for Kafka's 'key' there is"),
        (
            AMONG.format("headers", "key, value, topic, partition"),
            "column name \"headers\": set option 'includeHeaders'",
        ),
        (AMONG.format("key", "id, name"), 'column name "key" among (id, name).'),
        (
            "[ATTRIBUTE_NOT_SUPPORTED] Attribute `key` is not supported.",
            "not supported. If this is a frame of format rocketmq: for",
        ),
        ("[ATTRIBUTE_NOT_SUPPORTED] Attribute `keyz` is not supported.", "Attribute `keyz` is not supported."),
    ],
)
def test_other_errors_of_missing_columns_are_translated(text, end):
    assert end in explain(RuntimeError(text))


def test_code_of_the_user_says_what_it_said_last():
    text = (
        'stage failure\nTraceback (most recent call last):\n  File "udf.py", line 1\nZeroDivisionError: by zero\n\tat x'
    )
    assert explain(RuntimeError(text)) == "ZeroDivisionError: by zero"


def test_whatever_else_says_its_first_line():
    assert explain(RuntimeError("\n[UNRESOLVED_COLUMN] no `key`. SQLSTATE: 42703;\n'Project ['key]\n")) == (
        "[UNRESOLVED_COLUMN] no `key`."
    )
    assert explain(KeyboardInterrupt()) == "KeyboardInterrupt"
