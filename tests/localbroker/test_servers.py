"""What each server is given: names, files in its folder, ports."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import LocalBroker, servers
from rocketmq_spark.localbroker.servers import BrokerSpec

JARS = (Path("/jars/a.jar"),)


def _lines(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if line and not line.startswith("#"))


def test_names() -> None:
    assert servers.broker_names(2) == ["broker-a", "broker-b"]
    assert servers.broker_names(28)[25:] == ["broker-z", "broker-27", "broker-28"]
    assert servers.name_server_names(3) == ["namesrv", "namesrv-2", "namesrv-3"]
    assert BrokerSpec("broker-a", 0).name == "broker-a"
    assert BrokerSpec("broker-a", 2).name == "broker-a-slave-2"


def test_name_server(tmp_path: Path) -> None:
    program = servers.prepare_name_server(tmp_path, JARS, "namesrv", 20_000)
    assert _lines(tmp_path / "namesrv" / "namesrv.conf") == {"listenPort": "20000", "bindAddress": "127.0.0.1"}
    assert program.ports == (20_000,)
    assert (tmp_path / "namesrv" / "logback.xml").exists()


def test_master_and_slave(tmp_path: Path) -> None:
    conf = {"flushDiskType": "SYNC_FLUSH", "mappedFileSizeCommitLog": 4194304}
    master = servers.prepare_broker(tmp_path, JARS, BrokerSpec("broker-a", 0), 20_010, "127.0.0.1:1", conf)
    slave = servers.prepare_broker(tmp_path, JARS, BrokerSpec("broker-a", 1), 20_020, "127.0.0.1:1", conf)
    first, second = (_lines(program.home / "broker.conf") for program in (master, slave))
    differing = {key for key in first if first[key] != second[key]}
    assert differing == {"brokerId", "brokerRole", "listenPort", "storePathRootDir"}
    assert (second["brokerRole"], second["brokerId"], second["slaveReadEnable"]) == ("SLAVE", "1", "true")
    assert first["bindAddress"] == first["brokerIP1"] == "127.0.0.1"
    assert first["flushDiskType"] == "SYNC_FLUSH"
    assert first["mappedFileSizeCommitLog"] == "4194304"
    assert master.ports == (20_010, 20_008, 20_011)


def test_a_new_store_has_no_timers_before_now(tmp_path: Path) -> None:
    before = int(time.time())
    program = servers.prepare_broker(tmp_path, JARS, BrokerSpec("broker-a", 0), 20_010, "127.0.0.1:1", {})
    (read_until,) = struct.unpack(">q", _timer_checkpoint(program.home).read_bytes())
    assert before * 1000 <= read_until <= time.time() * 1000
    assert read_until % 1000 == 0, "RocketMQ counts timers by the second"


def test_a_store_that_is_there_keeps_the_time_of_its_timers(tmp_path: Path) -> None:
    path = _timer_checkpoint(tmp_path / "broker-a")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"as the broker left it")
    servers.prepare_broker(tmp_path, JARS, BrokerSpec("broker-a", 0), 20_010, "127.0.0.1:1", {})
    assert path.read_bytes() == b"as the broker left it"
    path.unlink()
    servers.prepare_broker(tmp_path, JARS, BrokerSpec("broker-a", 0), 20_010, "127.0.0.1:1", {})
    assert not path.exists(), "a store without it may hold timers of last week"


def _timer_checkpoint(home: Path) -> Path:
    return home / "store" / "config" / "timercheck"


def test_proxy(tmp_path: Path) -> None:
    program = servers.prepare_proxy(tmp_path, JARS, 20_030, "127.0.0.1:1", {})
    conf = json.loads((tmp_path / "proxy" / "rmq-proxy.json").read_text())
    assert (conf["remotingListenPort"], conf["grpcServerPort"]) == program.ports == (20_030, 20_031)
    assert conf["proxyMode"] == "CLUSTER"
    assert conf["enableRemotingLocalProxyGrpc"] is False
    assert "tlsTestModeEnable" not in conf
    assert [flag for flag in program.flags if "tls" in flag] == ["-Dtls.server.mode=disabled"]


def test_a_local_proxy_runs_in_the_broker_s_process(tmp_path: Path) -> None:
    broker = servers.prepare_broker(tmp_path, JARS[:1], BrokerSpec("broker-a", 0), 20_030, "127.0.0.1:1", {})
    both = servers.with_local_proxy(broker, JARS, "127.0.0.1:1", {"proxyMode": "LOCAL"})
    home = tmp_path / "broker-a"
    conf = json.loads((home / "rmq-proxy.json").read_text())
    assert (conf["proxyMode"], conf["namesrvAddr"]) == ("LOCAL", "127.0.0.1:1")
    assert both.ports == (*broker.ports, conf["remotingListenPort"], conf["grpcServerPort"])
    assert both.main_class.endswith("ProxyStartup")
    assert {str(home / "rmq-proxy.json"), str(home / "broker.conf")} <= set(both.arguments)
    assert both.jars == JARS


def test_a_mode_that_there_is_not_is_refused() -> None:
    assert [servers.proxy_mode({"proxyMode": mode}) for mode in ("local", "Cluster")] == [
        servers.LOCAL,
        servers.CLUSTER,
    ]
    with pytest.raises(LocalBrokerError, match="proxyMode is 'REMOTE'; expected CLUSTER or LOCAL"):
        servers.proxy_mode({"proxyMode": "REMOTE"})
    with pytest.raises(LocalBrokerError, match="runs in the process of one broker, but there are 2"):
        LocalBroker(brokers=2, proxy={"proxyMode": "LOCAL"})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"proxy": {"proxyMode": "LOCAL", "tlsCertPath": "c.pem"}},
            "takes no tlsCertPath: its broker would demand TLS",
        ),
        ({"proxy": {"proxyMode": "LOCAL"}, "ports": {"proxy": 20_030}}, "2 and 3 above its broker's"),
        ({"ports": {"proxy": 20_030}}, "Pass proxy=True, too"),
    ],
)
def test_what_a_proxy_cannot_have_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(LocalBrokerError, match=problem):
        LocalBroker(**given)
    LocalBroker(proxy=True, ports={"proxy": 20_030})


def test_tls_of_a_proxy_begins_with_its_first_start() -> None:
    with pytest.raises(LocalBrokerError, match="was started without TLS"):
        LocalBroker(proxy=True).restart("proxy", {"tlsCertPath": "c.pem"})


def test_a_proxy_with_a_certificate_speaks_tls_to_clients_only(tmp_path: Path) -> None:
    fields = {"tlsCertPath": "cert.pem", "tlsKeyPath": "key.pem", "maxDelayTimeMills": 5}
    program = servers.prepare_proxy(tmp_path, JARS, 20_030, "127.0.0.1:1", fields)
    conf = json.loads((tmp_path / "proxy" / "rmq-proxy.json").read_text())
    assert {name: conf[name] for name in fields} == fields
    assert conf["tlsTestModeEnable"] is False
    last = dict(flag.split("=") for flag in program.flags if "tls" in flag)
    assert last == {"-Dtls.server.mode": "enforcing", "-Dtls.enable": "false"}
