"""How many batches may be unacknowledged."""

from rocketmq_spark.sink.window import AIM_BYTES, MOST, START, Window


def test_a_fixed_window_stays():
    window = Window(3)
    window.answered(10, clean=False)
    window.answered(10, clean=True)
    assert window.size == 3


def test_it_grows_with_small_batches_to_a_limit():
    window = Window()
    assert window.size == START
    for _ in range(1000):
        window.answered(1000, clean=True)
    assert window.size == MOST


def test_it_grows_no_further_than_the_bytes_that_keep_a_connection_busy():
    window = Window()
    for _ in range(100):
        window.answered(1 << 20, clean=True)
    assert window.size == AIM_BYTES >> 20


def test_it_halves_when_a_broker_had_to_be_asked_again():
    window = Window()
    sizes = []
    for _ in range(4):
        window.answered(1000, clean=False)
        sizes.append(window.size)
    assert sizes == [2, 1, 1, 1]
