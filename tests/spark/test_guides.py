"""The tutorial and the how-to pages: each runs as it stands, from top to bottom, and prints what it shows."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest

from rocketmq_spark.localbroker import maven
from tests.fix_broker import facts_of
from tests.fix_clusters import SECURED, tls_cluster
from tests.fix_spark import ROOT
from tests.scale import soak
from tests.spark.guides import Guide

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

DOCS = ROOT / "docs"
INDEX = (DOCS / "how-to.md").read_text("utf-8")
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
# Pages that need a jar (the newest that can be had) or settings from the start of their session.
OF_A_SESSION = ("exactly-once", "avro-bodies", "schema-registry")
AVRO = "org.apache.spark:spark-avro_2.13:4.2.0"
AVRO_SHA256 = "4c186cedc03cbe4ee356a94b32232b347ef48611c3209400b3a77e4fe4abff4f"
# Those that need a cluster of their own.
OF_TLS = "tls-and-users"
# A run of spark-pipelines is a driver of its own.
LONG = ("pipelines",)
OTHERS = [path for path in PAGES if path.stem not in (*OF_A_SESSION, OF_TLS)]
IN_A_SESSION = """
    from pathlib import Path
    from rocketmq_spark import exactly_once_conf
    from tests.fix_broker import ElsewhereBroker
    from tests.spark.guides import Guide

    facts, jar, folder, *pages = sys.argv[1:]
    spark = new_session(spark_jars=jar, **exactly_once_conf())
    with ElsewhereBroker(**json.loads(facts)) as mq:
        for page in pages:
            guide = Guide(Path(page), spark, mq, Path(folder))
            guide.run()
            report([len(guide.outputs), guide.differences()])
    spark.stop()
"""


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=soak if path.stem in LONG else ()) for path in OTHERS]
)
def test_a_page_does_what_it_says(path, spark, rocketmq, tmp_path):
    guide = Guide(path, spark, rocketmq, tmp_path)
    guide.run()
    assert guide.differences() == []
    assert guide.outputs, "a page shows what its program prints"


@soak
@pytest.mark.spark
def test_pages_whose_session_is_their_own_do_what_they_say(rocketmq, run_script, tmp_path):
    jar = maven.download([AVRO], tmp_path / "jars", lambda size: None)[AVRO]
    assert hashlib.sha256(jar.read_bytes()).hexdigest() == AVRO_SHA256
    named = jar.rename(jar.with_suffix(".jar"))
    pages = [DOCS / "how-to" / f"{name}.md" for name in OF_A_SESSION]
    done = run_script(IN_A_SESSION, json.dumps(facts_of(rocketmq)), named, tmp_path, *pages)
    assert done.report[1] == []
    assert [differences for shown, differences in done.reports if shown] == [[]] * len(pages)


def test_the_page_with_tls_and_users_does_what_it_says(spark, certs, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCKETMQ_NEW_PASSWORD", "jobsecret")  # what the page lets its reader type
    shutil.copy(certs.ca, tmp_path)
    mq = tls_cluster(certs, conf={**SECURED, "autoCreateSubscriptionGroup": True})
    try:
        guide = Guide(DOCS / "how-to" / f"{OF_TLS}.md", spark, mq, tmp_path)
        guide.run()
    finally:
        mq.close()
    assert guide.differences() == []
    assert guide.outputs


def test_every_how_to_page_stands_in_the_index_once():
    assert sorted(re.findall(r"\]\(how-to/([^)#]+)\)", INDEX)) == [path.name for path in PAGES[1:]]


def test_each_page_has_topics_of_its_own():
    """So pages can be tried one after the other with one broker."""
    made = [re.findall(r"^rocketmq-spark topic create (\S+)", path.read_text("utf-8"), re.MULTILINE) for path in PAGES]
    names = [name for page in made for name in set(page)]
    assert len(names) == len(set(names))
