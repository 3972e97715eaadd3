"""Secrets reach the brokers and nothing else: no plan, offset, log of Spark, exception or ``repr``."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.fix_spark import finish
from tests.spark.pipelines import read, read_stream, write
from tests.witness import java_send

SECRETS = {"secretKey": "s3cr3t-of-the-user", "securityToken": "t0k3n-of-the-user", "tlsKeyPassword": "passw0rd-of-tls"}
# Plain text, said so: a password of a key file means nothing without its files.
OPTIONS = {"accessKey": "reader", "tls": "false", "tlsCertFile": "client.pem", **SECRETS}


def assert_clean(text):
    assert not [secret for secret in SECRETS.values() if secret in text]


@pytest.fixture
def filled(broker_cluster, topic):
    java_send(broker_cluster.name_server, topic, 16)
    return broker_cluster.name_server, topic


def test_plans(spark, filled):
    name_server, topic = filled
    frame = read(spark, name_server, topic, **OPTIONS)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for mode in ("simple", "extended", "codegen", "cost", "formatted"):
            frame.explain(mode=mode)
    assert_clean(shown.getvalue() + repr(frame))
    assert frame.count() == 16


def test_streams(spark, filled, tmp_path):
    name_server, topic = filled
    checkpoint = tmp_path / "checkpoint"
    query = (
        read_stream(spark, name_server, topic, startingOffsets="earliest", **OPTIONS)
        .select("body")
        .writeStream.format("rocketmq")
        .options(nameServer=name_server, topic=topic, **OPTIONS)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    logged = [path.read_text(errors="replace") for path in checkpoint.rglob("*") if path.is_file()]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        query.explain(True)
    progress = [str(p) for p in query.recentProgress]
    assert len(logged) > 3
    assert_clean("\n".join([*logged, *progress, shown.getvalue(), repr(query)]))


@pytest.mark.parametrize("bad", [{"nosuch": "1"}, {"pullDepth": "x"}, {"tls": "true", "tlsCaFile": "/nowhere"}])
def test_errors_of_a_source(spark, filled, bad):
    with pytest.raises(Exception, match="ROCKETMQ_") as caught:
        read(spark, *filled, **{**OPTIONS, **bad}).count()
    assert_clean(str(caught.value) + repr(caught.value))


def test_errors_of_a_sink(spark, filled):
    name_server, topic = filled
    frame = spark.sql("select cast(null as string) body")
    with pytest.raises(Exception, match="body is null") as caught:
        write(frame, name_server, topic=topic, **OPTIONS)
    assert_clean(str(caught.value) + repr(caught.value))
