"""Broken inputs for whatever takes bytes of others apart: 10,000 each, a million with ``make soak``."""

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.fuzz_decoders import main, run
from tests.fuzz.targets import TARGETS, outcome
from tests.harness import DECODERS, MAX_FRAME, peak_bytes
from tests.scale import SCALE

COUNT = 1_000_000 if SCALE >= 1 else 10_000
MAX_GROWTH = 256 << 20

every_decoder = pytest.mark.parametrize("decoder", TARGETS)


@every_decoder
def test_broken_inputs_are_values_or_refusals(decoder):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run(decoder, range(COUNT)) == COUNT
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MAX_GROWTH
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


def test_the_command_line(capsys):
    main(["0", "header"])
    assert capsys.readouterr().out == "1 inputs, 1 decoders\n"
