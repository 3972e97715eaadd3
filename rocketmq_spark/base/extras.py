"""The packages that the extras of rocketmq-spark install. A test compares this table with setup.cfg.

A remedy names the packages instead of the extra, so that it works however this package was installed.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

SPARK, ARROW, CLI, SPOOL, GRPC, DELAY, NOTEBOOK = "spark", "arrow", "cli", "spool", "grpc", "delay", "notebook"
OTEL = "otel"
METRICS = "metrics"

# xxhash computes the ids of rows for exactly-once writes.
_ARROW_REQUIREMENTS = ("pyarrow>=18.0", "numpy>=1.23.2", "xxhash>=3.1")
_PROTOBUF_REQUIREMENT = "protobuf>=6.33.5"
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    # foreach_batch_writer, write_rocketmq and read_rocketmq use PySpark's mapInArrow, which imports pandas, and warns about
    # pandas 3 at each start.
    SPARK: ("pyspark>=4.0", *_ARROW_REQUIREMENTS, "pandas>=2.2.0,<3"),
    ARROW: _ARROW_REQUIREMENTS,
    CLI: ("click>=8.1", "rich>=13"),
    SPOOL: ("rocksdict>=0.3.29",),
    GRPC: ("grpcio>=1.76", _PROTOBUF_REQUIREMENT),
    # Spark's stateful Python processors need protobuf, also in workers.
    DELAY: (_PROTOBUF_REQUIREMENT,),
    OTEL: ("opentelemetry-api>=1.27",),
    METRICS: ("prometheus-client>=0.20",),
    NOTEBOOK: ("ipykernel>=6.29", "matplotlib>=3.8", "pandas>=2.2,<3"),
}


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported here, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a finder may raise instead of returning None
        return False
    except ValueError:  # a program put a module without a spec into sys.modules
        return True


def extra_with_module(module: str) -> str | None:
    """Return the extra that installs ``module``, if a command needs this extra besides ``cli``; otherwise None."""
    package = module.partition(".")[0]
    return next(
        (
            extra
            for extra in (ARROW, SPARK)
            if any(requirement_parts(requirement)[0] == package for requirement in REQUIREMENTS[extra])
        ),
        None,
    )


def requirement_parts(requirement: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the parts of a requirement in the table: name, lowest version, and the first version that is too new.

    If the requirement has no upper bound, the third part is an empty tuple.
    """
    name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
    return name, tuple(map(int, low.split("."))), tuple(map(int, high.split("."))) if high else ()


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of ``extra``."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in REQUIREMENTS[extra])
