import random
import threading

from tests.late_threads import LATE_S, late


def test_each_thread_begins_late_and_runs_whole(monkeypatch):
    waited, ran = [], []
    monkeypatch.setattr(threading.Thread, "run", late(waited.append, random.Random(1)))
    threads = [threading.Thread(target=ran.append, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == list(range(40))
    assert len(waited) == 40
    assert set(waited) == set(LATE_S)


def test_the_plug_in_is_there_for_its_run_alone(pytester, monkeypatch):
    inside = pytester.makepyfile("""
        import threading
        from tests import late_threads

        def test_inside():
            assert threading.Thread.run.__qualname__.startswith(late_threads.late.__name__)
    """)
    whole = threading.Thread.run
    pytester.inline_run("-p", "tests.late_threads", inside).assertoutcome(passed=1)
    assert threading.Thread.run is whole
