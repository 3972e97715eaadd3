import os
import signal
import sys

import pytest

from rocketmq_spark.cli import demo_stage
from rocketmq_spark.cli.demo_stage import one_ctrl_c, stage


def test_a_cluster_that_exists_gets_two_new_topics(rocketmq, own_cache):
    with stage(rocketmq.name_server) as first, stage(rocketmq.name_server) as second:
        topics = {first.orders, first.totals, second.orders, second.totals}
        assert len(topics) == 4
        assert topics <= set(rocketmq.admin.topics())
        assert first.broker_data is None
        assert first.folder == own_cache / "demo" / "run-1"
        assert second.folder == own_cache / "demo" / "run-2"


def test_a_folder_is_used_again_empty_but_not_while_a_broker_runs_on_its_data(own_cache):
    with stage(None) as made:
        assert made.broker_data is not None
        (made.folder / "checkpoint").mkdir()
    assert made.broker_data.exists(), "the data stays"
    with stage(None) as again:
        assert again.folder == made.folder
        assert not (again.folder / "checkpoint").exists()
    with demo_stage.LocalBroker(data=made.broker_data), stage(None) as other:
        assert other.folder != made.folder


def test_ctrl_c_counts_once(capsys):
    with pytest.raises(KeyboardInterrupt), one_ctrl_c():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err == "Stopping ...\n"


def test_what_children_print_goes_to_a_file(tmp_path, capfd):
    with demo_stage._printing_to(tmp_path / "log"):
        os.system("echo out; echo err >&2")
    print("after", file=sys.stderr)
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    assert capfd.readouterr() == ("", "after\n")
