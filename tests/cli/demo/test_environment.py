import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from rocketmq_spark.cli.demo import environment as environment_module
from rocketmq_spark.cli.demo.environment import DemoEnvironment, demo_environment, interruptible
from rocketmq_spark.errors import LocalBrokerError, RocketMQError
from rocketmq_spark.localbroker import cluster, workspace


def test_a_cluster_that_exists_gets_two_new_topics(rocketmq, own_cache, as_found):
    with demo_environment(rocketmq.name_server) as first, demo_environment(rocketmq.name_server) as second:
        first.create_topics()
        second.create_topics()
        topics = {first.orders, first.totals, second.orders, second.totals}
        assert len(topics) == 4
        assert topics <= set(rocketmq.admin.topics())
        assert first.broker_data is None
        assert first.folder == own_cache / "demo" / "run-1"
        assert second.folder == own_cache / "demo" / "run-2"


@pytest.mark.parametrize(("grpc", "proxy"), [(False, None), (True, "p:8081")])
def test_its_own_broker_has_a_proxy_for_grpc(grpc, proxy, own_cache, monkeypatch):
    broker = MagicMock()
    broker.return_value.__enter__.return_value = SimpleNamespace(name_server="n:1", proxy_grpc="p:8081")
    monkeypatch.setattr(environment_module, "LocalBroker", broker)
    monkeypatch.setattr(environment_module, "BaseAdmin", MagicMock())
    with demo_environment(None, grpc) as environment:
        assert (environment.name_server, environment.proxy) == ("n:1", proxy)
    assert broker.call_args.kwargs["proxy"] is grpc


def test_a_free_folder_is_emptied_and_one_in_use_left_alone(tmp_path):
    def free():
        folder, lock = environment_module._free_folder(tmp_path)
        os.close(lock)
        return folder

    first = free()
    (first / "checkpoint").mkdir()
    assert free() == first == tmp_path / "run-1"
    assert not (first / "checkpoint").exists()
    (first / "broker").mkdir()
    claim = workspace.reserve(tmp_path / "claims", first / "broker", keeps_data=True)
    assert free() == tmp_path / "run-2"
    assert (first / "broker").exists()
    claim.release(delete=False)
    assert free() == first


def test_what_others_may_have_planted_is_not_followed(tmp_path):
    """A folder that others may write to is left alone; links in one that they could write to once are removed."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1").chmod(0o777)
    (tmp_path / "run-2").mkdir(0o700)
    (tmp_path / "run-2" / "spark.log").symlink_to(secret)
    (tmp_path / "run-2" / "folder").symlink_to(tmp_path)
    folder, lock = environment_module._free_folder(tmp_path)
    os.close(lock)
    assert folder == tmp_path / "run-2"
    assert [path.name for path in (tmp_path / "run-2").iterdir()] == ["in-use"]
    assert secret.read_text() == "secret"


def test_a_disk_that_opens_new_folders_to_others_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(environment_module.folders, "is_writable_by_owner_only", lambda path: False)
    with pytest.raises(LocalBrokerError, match=r"run-1, which was just created.*ROCKETMQ_SPARK_CACHE"):
        environment_module._free_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_run_is_no_link(tmp_path):
    secret = tmp_path / "secret"
    (tmp_path / "run-1").mkdir(0o700)
    (tmp_path / "run-1" / "in-use").symlink_to(secret)
    with pytest.raises(OSError, match="link"):
        environment_module._free_folder(tmp_path)
    assert not secret.exists()


INTERRUPTED = """
import signal, sys
from rocketmq_spark.cli.demo import environment

environment._STOP_TIMEOUT_S = int(sys.argv[1])
with environment.interruptible():
    try:
        print("running", flush=True)
        signal.pause()
    finally:
        print("ending", flush=True)
        while True:
            signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("within_s", "second"), [(600, True), (1, False)])
def test_an_end_that_hangs_is_cut_short(number, within_s, second):
    """By a second Ctrl-C, or when its time is up."""
    demo = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(within_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in ("running\n", "ending\n"):
        assert demo.stdout.readline() == line
        if second or line == "running\n":
            demo.send_signal(number)
    assert demo.communicate() == ("", "Stopping ...\nEnded before everything was closed\n")
    assert demo.returncode == 130


def test_the_first_ctrl_c_interrupts_and_leaves_no_trace(capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]

    @interruptible()
    def work():
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.alarm(0) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert capfd.readouterr().err == "Stopping ...\n"


@pytest.fixture
def own(own_cache, monkeypatch):
    """An environment with a broker of its own, which is made up: the names of its servers that run, in ``pids``."""
    pids = {"namesrv": 1, "broker-a": 2, "proxy": 3}
    broker = MagicMock()
    broker.return_value.__enter__.return_value = SimpleNamespace(
        name_server="n:1", proxy_grpc="p:8081", brokers=["broker-a"], data=Path("/data"), pid=pids.get,
        kill=lambda name: pids.pop(name), pids=pids,
    )  # fmt: skip
    monkeypatch.setattr(environment_module, "LocalBroker", broker)
    monkeypatch.setattr(environment_module, "BaseAdmin", MagicMock())
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: SimpleNamespace(used=1, free=1 << 40))
    return pids


def failing(change):
    with demo_environment(None, True):
        change()
        raise RocketMQError("a symptom")


@pytest.mark.parametrize("name", ["namesrv", "broker-a", "proxy"])
def test_an_error_after_the_end_of_a_server_says_so(own, name):
    with pytest.raises(LocalBrokerError, match=rf"{name}, a server of the demo, has ended.*/data/{name}"):
        failing(lambda: own.pop(name))


@pytest.mark.parametrize(("used", "free", "text"), [(99, 1 << 30, "more than 90%"), (0, 1 << 20, "less than 128 MiB")])
def test_an_error_on_a_full_disk_says_so(own, monkeypatch, used, free, text):
    usage = SimpleNamespace(used=used << 30, free=free)
    with pytest.raises(LocalBrokerError, match=rf"{text}.*ROCKETMQ_SPARK_CACHE"):
        failing(lambda: monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: usage))


def test_other_errors_stay_as_they_are(own):
    with pytest.raises(RocketMQError, match="a symptom"):
        failing(lambda: None)


def test_only_the_demo_s_own_brokers_need_a_tenth_of_the_disk(tmp_path, monkeypatch):
    environment = DemoEnvironment("n:1", "orders", "totals", tmp_path, None)
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: SimpleNamespace(used=99 << 30, free=1 << 30))
    environment.check()
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: SimpleNamespace(used=0, free=1 << 20))
    with pytest.raises(LocalBrokerError, match="less than 128 MiB"):
        environment.check()


@pytest.mark.parametrize(("error", "left"), [(KeyboardInterrupt, 0), (RocketMQError, 3), (None, 3)])
def test_an_interrupted_demo_kills_its_servers(own, error, left):
    """A clean stop may take 20 s, and is for data that is used again."""
    with contextlib.suppress(KeyboardInterrupt, RocketMQError), demo_environment(None, True):
        if error is not None:
            raise error
    assert len(own) == left


@pytest.mark.parametrize("data", [None, Path("/data")])
def test_the_process_of_the_query_gets_all_of_it(data):
    environment = DemoEnvironment(
        "n:1", "orders", "totals", Path("/run-1"), data, "p:8081", lock=7, servers=MagicMock()
    )
    assert environment.to_json().endswith(b"}\n")
    assert DemoEnvironment.from_json(environment.to_json()) == environment
