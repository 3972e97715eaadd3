"""What a user sees on the console besides results: nothing that is not about their query."""

from __future__ import annotations

from tests.reading import feed


def test_stream_that_is_stopped_leaves_no_traceback(rocketmq, topic, run_script):
    feed(rocketmq, topic, 20)
    script = """
    name_server, topic = sys.argv[1:]
    spark = new_session()
    stream = spark.readStream.format("rocketmq").option("nameServer", name_server).option("subscribe", topic)
    query = stream.option("startingOffsets", "earliest").load().writeStream.format("memory").queryName("t").start()
    query.processAllAvailable()
    query.stop()
    again = stream.load().writeStream.format("noop").start()  # stopped while it waits for messages
    wait_until(again, lambda: again.lastProgress)
    again.stop()
    count = spark.table("t").count()
    print("##over", file=sys.stderr, flush=True)
    spark.stop()
    report(count)
    """
    done = run_script(script, rocketmq.name_server, topic)
    assert done.report == 20
    # Idle planners of any Python source may say that the session has gone (docs/upstream.md): no stream's doing.
    of_streams, over, _ = done.err.partition("##over")
    assert over
    assert "Traceback" not in of_streams, done.err
    assert "BrokenPipe" not in of_streams
