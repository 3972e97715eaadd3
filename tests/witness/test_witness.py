"""The witness itself: every kind of message, sent one by one and in batches."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.witness import KINDS, java_read, java_send, mqadmin, run_java


@pytest.mark.parametrize("batch", [1, 7])
def test_what_was_sent_is_read(broker_cluster, topic, batch):
    sent = java_send(broker_cluster.name_server, topic, 160, kinds=KINDS, batch=batch)
    read = java_read(broker_cluster.name_server, topic)
    assert len({record.id for record in sent}) == 160
    assert {r.id: (r.place, r.content) for r in read} == {r.id: (r.place, r.content) for r in sent}
    assert Counter(record.kind for record in sent) == dict.fromkeys(KINDS, 20)
    assert {record.queue for record in sent} == set(range(8))
    sizes = {record.kind: record.size for record in sent}
    assert (sizes["plain"], sizes["big"]) == (100, 60 << 10)
    assert sizes["zlib"] == sizes["lz4"] == sizes["zstd"] == 8000


def test_a_call_that_fails_says_why_and_the_next_one_is_served(broker_cluster, topic):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)Send failed:.*for this topic, no-such"):
            java_send(broker_cluster.name_server, "no-such-topic-for-the-witness", 1)
    java_send(broker_cluster.name_server, topic, 3)
    assert len(java_read(broker_cluster.name_server, topic)) == 3
    assert topic in mqadmin("topicList", "-n", broker_cluster.name_server)


def test_a_call_that_takes_too_long_ends_its_jvm(broker_cluster, topic):
    options = {"nameServer": broker_cluster.name_server, "topic": topic, "count": 1}
    with pytest.raises(RuntimeError, match=r"Read did not end within 0.2 s, or its JVM died \(-9\)"):
        run_java("Read", options, timeout_s=0.2)
    assert java_read(broker_cluster.name_server, topic) == []
