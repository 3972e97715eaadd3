"""Java, Python, packages and the Python of workers."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.doctor import findings
from rocketmq_spark.cli.doctor.findings import Level
from rocketmq_spark.errors import LocalBrokerError

FINE = {"rocketmq-spark": "0.1.0", "pyspark": "4.3.0.dev1", "pyarrow": "21.0.0", "numpy": "2.1", "pandas": "2.2.3"}


def test_java() -> None:
    assert findings.java_finding(("/j/bin/java", 17)) == ("java", Level.OK, "Java 17, /j/bin/java", None)
    gone = findings.java_finding(LocalBrokerError("Java 17 or newer is needed", remedy="Install one"))
    assert gone == ("java", Level.BROKEN, "Java 17 or newer is needed", "Install one")


@pytest.mark.parametrize(
    ("changed", "level", "remedy"),
    [
        ({}, Level.OK, None),
        ({"pyspark": "4.2.0"}, Level.OK, None),
        ({"pyspark": "4.2"}, Level.OK, None),
        ({"pyspark": "3.5.2"}, Level.OK, None),  # a vendor's may have all parts: ``has_data_sources`` looks
        ({"pyspark": None, "pyarrow": "17.0.0"}, Level.BROKEN, "pip install 'pyspark>=4.0' 'pyarrow>=18.0'"),
        ({"rocketmq-spark": None}, Level.OK, None),  # run from its folder
        ({"pandas": "3.0.0"}, Level.ADVICE, "pip install 'pandas<3'"),
        ({"pandas": "3"}, Level.ADVICE, "pip install 'pandas<3'"),
    ],
)
def test_packages(changed: dict[str, str | None], level: Level, remedy: str | None) -> None:
    found = findings.python_finding("3.11.9", {**FINE, **changed})
    assert (found.level, found.remedy) == (level, remedy)
    told = ", ".join(f"{name} {number}" for name, number in {**FINE, **changed}.items() if number is not None)
    assert found.text.partition(";")[0] == f"Python 3.11.9, {told}"


def test_pyspark_without_data_sources() -> None:
    found = findings.no_data_sources_finding("3.5.9")
    assert found.level is Level.ADVICE
    assert "3.5.9 lacks pyspark.sql.datasource" in found.text
    assert "read_rocketmq" in str(found.remedy)


def test_the_python_of_workers() -> None:
    assert findings.workers_finding("python3", "/venv/bin/python", True).level is Level.OK
    found = findings.workers_finding("python3", "/venv/bin/python", False)
    assert (found.level, found.remedy) == (
        Level.BROKEN, "Activate the virtual environment, or set PYSPARK_PYTHON=/venv/bin/python",
    )  # fmt: skip
