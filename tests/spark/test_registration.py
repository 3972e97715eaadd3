"""Spark finds the source by itself or by ``register``, also beside broken or unrelated packages."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError

from rocketmq_spark import register
from rocketmq_spark.spark import datasource
from rocketmq_spark.spark.context_settings import SETTINGS_VARIABLE as CONTEXT_SETTINGS
from tests.fix_spark import ROOT
from tests.reading import feed

# An error of this package shows that Spark has found the source; none of these scripts has a broker.
ASK = """
    def ask(spark, name="rocketmq"):
        try:
            spark.read.format(name).option("nosuchoption", "1").load()
        except Exception as e:
            return str(e)
        return "loaded"
"""

OTHER = '''
from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """A source of another package."""

    @classmethod
    def name(cls):
        return "other"

    def schema(self):
        return "id bigint"
'''


@pytest.fixture
def packages(tmp_path):
    """Makes packages that come first on the path; returns this path."""

    def make(**contents):
        for name, text in contents.items():
            folder = tmp_path / "packages" / name
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text(textwrap.dedent(text))
        return f"{tmp_path / 'packages'}:{ROOT}"

    return make


def test_nothing_needs_to_be_registered(spark):
    """No test of this folder calls ``register`` in the shared session."""
    with pytest.raises(Exception, match="option 'nosuchoption' is unknown"):
        spark.read.format("rocketmq").option("nosuchoption", "1").load()


@pytest.mark.parametrize(
    "error", [AttributeError("dataSourceManager"), TypeError("not callable"), Py4JError("no such method")]
)
def test_register_works_if_internals_of_spark_differ(error):
    """Only streams that start at the same moment need these internals."""

    class Changed:
        _sc = SimpleNamespace(pythonExec=sys.executable)
        dataSource = SimpleNamespace(register=lambda source: registered.append(source.name()))

        @property
        def _jsparkSession(self):
            raise error

    registered = []
    with pytest.warns(
        UserWarning, match="that start at once may break each other .*Start the streams one after the other"
    ):
        register(Changed())
    assert registered == ["rocketmq"]


def test_a_source_that_spark_has_found_is_not_registered_again():
    """Otherwise Spark warns that the source is replaced, and again at the start of each stream."""
    variables = {}

    class Variables:
        containsKey = staticmethod(variables.__contains__)
        put = staticmethod(variables.__setitem__)

    kept = SimpleNamespace(dataSourceCls=lambda: SimpleNamespace(envVars=lambda: Variables))
    manager = SimpleNamespace(dataSourceExists=lambda name: name in known, lookupDataSource=lambda name: kept)
    known: list[str] = []
    context = SimpleNamespace(
        pythonExec=sys.executable, getConf=lambda: SimpleNamespace(get=lambda name, default=None: default)
    )
    spark = SimpleNamespace(
        _sc=context,
        sparkContext=context,
        _jsparkSession=SimpleNamespace(sessionState=lambda: SimpleNamespace(dataSourceManager=lambda: manager)),
        dataSource=SimpleNamespace(register=lambda source: known.append(source.name())),
        conf=SimpleNamespace(get=lambda name, default=None: default),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasource, "_runner_variables", lambda spark: {"A": "1"})
        register(spark)
        assert (known, variables.keys()) == (["rocketmq"], {"A", CONTEXT_SETTINGS}), "Spark had not found it"
        variables.clear()
        register(spark)
    assert (known, variables.keys()) == (["rocketmq"], {"A", CONTEXT_SETTINGS})


def test_register_works_if_spark_does_not_find_the_package(run_script, packages):
    """A package of the same name without a source comes first on the path."""
    path = packages(pyspark_rocketmq="")
    script = """
    from rocketmq_spark import register
    spark = new_session()
    report(ask(spark))
    register(spark)
    register(spark)
    report(ask(spark))
    """
    done = run_script(ASK + script, PYTHONPATH=path)
    assert done.code == 0, done.err
    before, after = done.reports
    assert "Failed to find the data source: rocketmq" in before
    assert "option 'nosuchoption' is unknown" in after


def test_other_sources_work_if_pyarrow_is_broken(run_script, packages):
    path = packages(pyarrow="raise ImportError('this pyarrow is broken')", pyspark_other=OTHER)
    script = """
    spark = new_session()
    report(spark.read.format("other").load().columns)
    report(ask(spark))
    """
    done = run_script(ASK + script, PYTHONPATH=path)
    assert done.code == 0, done.err
    columns, ours = done.reports
    assert columns == ["id"]
    # Ours says what it has to say, too: it asks for pyarrow when there is something to read.
    assert "option 'nosuchoption' is unknown" in ours


def test_streams_that_start_at_once_add_no_shared_variables(run_script):
    """A stream adds its variables without a lock, which may damage the map for all queries of the driver. ``register`` adds them
    before. Tested for the source of this session, and for the one that other sessions find by themselves.
    """
    script = """
    import time
    from rocketmq_spark import register

    spark = new_session()
    manager = lambda session: session._jsparkSession.sessionState().dataSourceManager()
    variables = lambda session: manager(session).lookupDataSource("rocketmq").dataSourceCls().envVars()
    other = spark.newSession()
    found = set(variables(other))
    register(spark)
    register(spark)
    before = {name: set(variables(session)) for name, session in (("own", spark), ("other", other))}
    queries = []
    for session in (spark, spark, other):
        stream = session.readStream.format("rocketmq").option("nameServer", "127.0.0.1:1").option("subscribe", "t").load()
        queries.append(stream.writeStream.format("noop").start())
    for query in queries:
        try:
            query.awaitTermination()
        except Exception as e:
            assert "no name server answers" in str(e), e
    report({
        "found": sorted(found),
        "before": {name: sorted(keys) for name, keys in before.items()},
        "after": {"own": sorted(variables(spark)), "other": sorted(variables(other))},
        "sizes": [variables(spark).size(), variables(other).size()],
    })
    """
    seen = run_script(script).report
    runners = {"SPARK_LOCAL_DIRS", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE", "SPARK_PYTHON_RUNTIME"}
    assert not runners & set(seen["found"])
    assert runners < set(seen["before"]["own"])
    assert runners < set(seen["before"]["other"])
    assert seen["after"] == seen["before"]
    assert seen["sizes"] == [len(seen["after"]["own"]), len(seen["after"]["other"])]


KRYO = """
    import tempfile
    from rocketmq_spark import explain, register

    name_server, topic = sys.argv[1:]
    spark = new_session(
        spark_serializer="org.apache.spark.serializer.KryoSerializer", **{"spark.kryo.registrationRequired": "true"}
    )

    def read():
        found = []
        frame = spark.readStream.format("rocketmq").options(nameServer=name_server, subscribe=topic, startingOffsets="earliest")
        writer = frame.load().writeStream.option("checkpointLocation", tempfile.mkdtemp()).trigger(availableNow=True)
        try:
            finish(writer.foreachBatch(lambda batch, _: found.extend(row.body.decode() for row in batch.collect())).start())
        except Exception as e:
            return explain(e)
        return sorted(found)

    report([read(), register(spark), read()])
    spark.stop()
"""


def test_with_required_kryo_registration_tasks_read(rocketmq, topic, run_script):
    """Spark stores rows that come with a plan with its serializer, which then rejects arrays and maps."""
    sent = feed(rocketmq, topic, 5, keys=["k"], properties={"n": "1"})
    unregistered, _, read = run_script(KRYO, rocketmq.name_server, topic).report
    assert "call register(spark) before the query starts" in unregistered
    assert read == sorted(sent)
