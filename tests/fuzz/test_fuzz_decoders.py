"""Broken inputs for whatever takes bytes of others apart: 10,000 each, a million with ``make soak ONLY=fuzz``."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import fuzz_decoders
from tests.fuzz.fuzz_decoders import TooCostly, main, run
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, Target, outcome
from tests.harness import DECODERS, MAX_FRAME, peak_bytes
from tests.scale import SCALE

COUNT = 1_000_000 if SCALE >= 1 else 4_000

every_decoder = pytest.mark.parametrize("decoder", TARGETS)


@every_decoder
@pytest.mark.timeout(3600 if SCALE >= 1 else 900)
def test_broken_inputs_are_values_or_refusals(decoder):
    assert run(decoder, range(COUNT)) == COUNT
    print(f"{decoder}: {COUNT} inputs")


@every_decoder
@given(data=st.binary(max_size=200))
def test_any_bytes(decoder, data):
    outcome(TARGETS[decoder], data)


@every_decoder
def test_samples_are_read_by_some_decoder(decoder):
    assert any(not isinstance(outcome(TARGETS[decoder], data), type) for data in TARGETS[decoder].samples)


@pytest.mark.parametrize("decoder", DECODERS)
def test_large_announcements_take_no_memory(decoder):
    for data in TARGETS[decoder].samples[:5]:
        for at in range(0, min(len(data), 100), 3):
            broken = data[:at] + b"\x7f\xff\xff\xff" + data[at + 4 :]
            assert peak_bytes(lambda b=broken: DECODERS[decoder](b)) < 2 * MAX_FRAME + 200 * len(broken)


@pytest.mark.parametrize(("cost", "words"), [(lambda: spin(0.03), "s of CPU"), (lambda: bytes(8 << 20), "bytes")])
def test_an_input_that_costs_too_much_is_found_and_printed(cost, words, monkeypatch, capsys):
    held = []
    monkeypatch.setitem(TARGETS, "costly", Target(lambda data: held.append(cost()), [b"x"], ()))
    monkeypatch.setattr(fuzz_decoders, "MAX_CPU_S", 0.02 if "CPU" in words else 60)
    monkeypatch.setattr(fuzz_decoders, "MAX_BYTES", 1 << 40 if "CPU" in words else -(1 << 40))
    with pytest.raises(TooCostly, match=words):
        run("costly", range(7, 8))
    assert "costly, seed 7: " in capsys.readouterr().err


def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_some_inputs_are_grown():
    sizes = [len(mutate(random.Random(seed), [b"abc"])) for seed in range(20_000)]
    assert 5 < sum(size > 10_000 for size in sizes) < 100
    assert max(sizes) < 300 << 10


def test_the_command_line(capsys):
    main(["0", "header"])
    assert capsys.readouterr().out == "1 inputs, 1 decoders\n"
