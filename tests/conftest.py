"""Fixtures that every test may use, one plug-in per subject."""

pytest_plugins = [
    "pytester",
    "tests.fix_house",
    "tests.fix_broker",
    "tests.fix_proxy",
    "tests.fix_spark",
    "tests.fix_wheel",
    "tests.fix_clusters",
]
