"""A short run of every fuzzer, and random bytes for every decoder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.fuzz_decoders import main, run
from tests.harness import DECODERS, MAX_FRAME, outcome, peak_bytes, samples

every_decoder = pytest.mark.parametrize("decoder", DECODERS)


@every_decoder
def test_broken_inputs(decoder):
    assert run(decoder, range(1500)) == 1500


@every_decoder
@given(data=st.binary(max_size=200))
def test_any_bytes(decoder, data):
    outcome(DECODERS[decoder], data)


@every_decoder
def test_samples_are_read_by_some_decoder(decoder):
    assert any(not isinstance(outcome(DECODERS[decoder], data), type) for data in samples(decoder))


@every_decoder
def test_large_announcements_take_no_memory(decoder):
    for data in samples(decoder)[:5]:
        for at in range(0, min(len(data), 100), 3):
            broken = data[:at] + b"\x7f\xff\xff\xff" + data[at + 4 :]
            assert peak_bytes(lambda b=broken: DECODERS[decoder](b)) < 2 * MAX_FRAME + 200 * len(broken)


def test_the_command_line(capsys):
    main(["0", "header"])
    assert capsys.readouterr().out == "1 inputs, 1 decoders\n"
