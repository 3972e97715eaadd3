"""How Spark finds the source: by itself, by hand, and beside packages of others, whatever is broken."""

from __future__ import annotations

import textwrap

import pytest

from tests.fix_spark import ROOT

# Any of our own errors shows that Spark reached us; none of these scripts has a broker.
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
    """Somebody else's."""

    @classmethod
    def name(cls):
        return "other"

    def schema(self):
        return "id bigint"
'''


@pytest.fixture
def packages(tmp_path):
    """Makes packages that stand before all others on the path; returns that path."""

    def make(**contents):
        for name, text in contents.items():
            folder = tmp_path / "packages" / name
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text(textwrap.dedent(text))
        return f"{tmp_path / 'packages'}:{ROOT}"

    return make


def test_nothing_needs_to_be_registered(spark):
    """As in all tests of this folder: nobody has registered anything in this session."""
    with pytest.raises(Exception, match="option 'nosuchoption' is unknown"):
        spark.read.format("rocketmq").option("nosuchoption", "1").load()


def test_by_hand_where_spark_finds_nothing(run_script, packages):
    """A package of the same name without a source stands before ours."""
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


def test_other_sources_live_when_pyarrow_is_broken(run_script, packages):
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
    assert "this pyarrow is broken" in ours or "option 'nosuchoption' is unknown" in ours
