import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from rocketmq_spark.cli.demo import stage as stage_module
from rocketmq_spark.cli.demo.stage import Stage, one_ctrl_c, stage
from rocketmq_spark.localbroker import site


def test_a_cluster_that_exists_gets_two_new_topics(rocketmq, own_cache, as_found):
    with stage(rocketmq.name_server) as first, stage(rocketmq.name_server) as second:
        topics = {first.orders, first.totals, second.orders, second.totals}
        assert len(topics) == 4
        assert topics <= set(rocketmq.admin.topics())
        assert first.broker_data is None
        assert first.folder == own_cache / "demo" / "run-1"
        assert second.folder == own_cache / "demo" / "run-2"


@pytest.mark.parametrize(("grpc", "proxy"), [(False, None), (True, "p:8081")])
def test_a_broker_of_its_own_has_a_proxy_where_one_is_wanted(grpc, proxy, own_cache, monkeypatch):
    broker = MagicMock()
    broker.return_value.__enter__.return_value = SimpleNamespace(name_server="n:1", proxy_grpc="p:8081")
    monkeypatch.setattr(stage_module, "LocalBroker", broker)
    monkeypatch.setattr(stage_module, "BaseAdmin", MagicMock())
    with stage(None, grpc) as made:
        assert (made.name_server, made.proxy) == ("n:1", proxy)
    assert broker.call_args.kwargs["proxy"] is grpc


def test_a_folder_is_used_again_empty_but_not_while_a_broker_runs_on_its_data(tmp_path):
    def free():
        folder, lock = stage_module._free_folder(tmp_path)
        os.close(lock)
        return folder

    first = free()
    (first / "checkpoint").mkdir()
    assert free() == first == tmp_path / "run-1"
    assert not (first / "checkpoint").exists()
    (first / "broker").mkdir()
    claim = site.claim(tmp_path / "claims", first / "broker", keep=True)
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
    folder, lock = stage_module._free_folder(tmp_path)
    os.close(lock)
    assert folder == tmp_path / "run-2"
    assert [path.name for path in (tmp_path / "run-2").iterdir()] == ["in-use"]
    assert secret.read_text() == "secret"


def test_the_lock_of_a_run_is_no_link(tmp_path):
    secret = tmp_path / "secret"
    (tmp_path / "run-1").mkdir(0o700)
    (tmp_path / "run-1" / "in-use").symlink_to(secret)
    with pytest.raises(OSError, match="link"):
        stage_module._free_folder(tmp_path)
    assert not secret.exists()


def test_ctrl_c_counts_once(capsys):
    @one_ctrl_c()
    def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err == "Stopping ...\n"


@pytest.mark.parametrize("data", [None, Path("/data")])
def test_the_process_of_the_query_gets_all_of_it(data):
    made = Stage("n:1", "orders", "totals", Path("/run-1"), data, "p:8081")
    assert made.to_json().endswith(b"}\n")
    assert Stage.from_json(made.to_json()) == made
