"""Spark through the Remoting port of a Proxy whose advertised address cannot be reached: the programs of docs/hosted.md."""

from __future__ import annotations

import re

import pytest

from rocketmq_spark import Admin, Message, Producer
from tests.fix_clusters import POD
from tests.fix_spark import ROOT
from tests.live.grpc.proxied import new_topic
from tests.mockbroker import eventually
from tests.reading import names
from tests.spark.guides import placed
from tests.spark.pipelines import write

MAPPED = {"addressMap": "nameServer"}


def programs(mq, spark, topics, folder):
    """The page's Python programs, for this cluster."""
    text = (ROOT / "docs" / "hosted.md").read_text("utf-8")
    for program in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for shown, here in topics.items():
            program = program.replace(f'"{shown}"', f'"{here}"')
        yield placed(program.replace("rocketmq.example:8080", mq.proxy_server), folder)


def bodies(spark, server, topic, **options):
    frame = spark.read.format("rocketmq").options(nameServer=server, subscribe=topic, **options).load()
    return sorted(bytes(row.body).decode() for row in frame.select("body").collect())


def stored(spark, mq, topic):
    return bodies(spark, mq.name_server, topic)


def test_the_programs_of_the_page(spark, hidden_proxy, tmp_path, capsys):
    topics = {"orders": new_topic(hidden_proxy, queues=2), "copies": new_topic(hidden_proxy, queues=2)}
    made = names(20)
    with Producer(hidden_proxy.proxy_server, "p", address_map="nameServer") as producer:
        for body in made:
            producer.send(Message(topics["orders"], body.encode()))
    job, consumer = programs(hidden_proxy, spark, topics, tmp_path)
    exec(compile(job, "page", "exec"), {"spark": spark})
    eventually(lambda: stored(spark, hidden_proxy, topics["copies"]) == sorted(made), 60)
    exec(compile(job, "page", "exec"), {"spark": spark})  # the restart copies nothing again
    assert stored(spark, hidden_proxy, topics["copies"]) == sorted(made)
    exec(compile(consumer, "page", "exec"), {})
    printed = [line[2:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("b'")]
    assert printed
    assert set(printed) <= set(made)
    with Admin(hidden_proxy.proxy_server, address_map="nameServer") as admin:
        committed = admin.offsets("billing", [topics["orders"]])
    assert sum(offset or 0 for offset in committed.values()) == len(printed)


def test_rows_written_in_a_batch_are_read_in_a_batch(spark, hidden_proxy):
    topic, made = new_topic(hidden_proxy, queues=2), names(50)
    rows = spark.createDataFrame([(body.encode(),) for body in made], "body binary")
    write(rows, hidden_proxy.proxy_server, topic=topic, **MAPPED)
    eventually(lambda: stored(spark, hidden_proxy, topic) == sorted(made), 60)
    assert bodies(spark, hidden_proxy.proxy_server, topic, **MAPPED) == sorted(made)


def test_without_the_option_spark_s_error_names_it(spark, hidden_proxy):
    topic = new_topic(hidden_proxy, queues=2)
    with pytest.raises(Exception, match="'addressMap' to nameServer") as caught:
        bodies(spark, hidden_proxy.proxy_server, topic)
    assert POD in str(caught.value)
