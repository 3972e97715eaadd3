"""Configuration: templates filled in, the user's lines on top, and conf/ made from the same templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import servers

CONF = Path(__file__).parents[2] / "conf"


def _lines(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def test_conf_folder_is_what_the_templates_make() -> None:
    """And Grafana's dashboard and Prometheus' alerts, of which ``tests/test_metrics`` thinks."""
    found = {p.name: p.read_text() for p in CONF.iterdir()}
    assert found.pop("grafana-dashboard.json")
    assert found.pop("alerts.yml")
    assert found == servers.compose_files()


def test_write_compose_files(tmp_path: Path) -> None:
    servers.write_compose_files(tmp_path / "conf")
    assert {p.name for p in (tmp_path / "conf").iterdir()} == {"namesrv.conf", "broker.conf", "rmq-proxy.json"}


def test_no_line_has_a_trailing_comment() -> None:
    for name in ("broker.conf", "namesrv.conf"):
        assert not [v for v in _lines(servers.compose_files()[name]).values() if "#" in v]


def test_a_queue_file_holds_whole_entries() -> None:
    assert int(_lines(servers.compose_files()["broker.conf"])["mappedFileSizeConsumeQueue"]) % 20 == 0


def test_proxy_configuration_is_json() -> None:
    assert json.loads(servers.compose_files()["rmq-proxy.json"])["proxyMode"] == "CLUSTER"


def test_user_lines_replace_and_add() -> None:
    text = servers.replace_lines("# note\na=1\nb=2\n", {"b": True, "c": 3, "d": "x\\y"})
    assert text == "# note\na=1\nb=true\nc=3\nd=x\\\\y\n"


def test_fields_replace_and_add() -> None:
    made = servers.replace_fields('{"a": 1, "b": 2}', {"b": True, "c": "x"})
    assert json.loads(made) == {"a": 1, "b": True, "c": "x"}


def test_what_a_server_has_is_changed(tmp_path: Path) -> None:
    for name, text in (("broker.conf", "a=1\n"), ("rmq-proxy.json", '{"a": 1}')):
        home = tmp_path / name.partition(".")[0]
        home.mkdir()
        (home / name).write_text(text)
        servers.change_conf(home, name, {"a": 2})
    assert (tmp_path / "broker" / "broker.conf").read_text() == "a=2\n"
    assert json.loads((tmp_path / "rmq-proxy" / "rmq-proxy.json").read_text()) == {"a": 2}
    (tmp_path / "namesrv").mkdir()
    with pytest.raises(LocalBrokerError, match="namesrv takes no conf"):
        servers.change_conf(tmp_path / "namesrv", servers.BROKER_CONF, {"a": 2})


@pytest.mark.parametrize("key", sorted(servers.RESERVED_SETTINGS))
def test_lines_that_the_cluster_decides_are_refused(key: str) -> None:
    with pytest.raises(LocalBrokerError, match=rf"conf must not set {key}: LocalBroker decides it"):
        servers.checked_conf({key: "x"})


def test_a_value_is_one_line() -> None:
    with pytest.raises(LocalBrokerError, match="The value of a in conf has a line break"):
        servers.checked_conf({"a": "1\nbrokerRole=SLAVE"})
