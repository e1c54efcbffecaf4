"""The rehearsal of a slow link."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from launch import rehearse
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.local_ranks import run_local_ranks
from unifmoe_dist.studies.rehearsal import slow_link, slow_link_report
from unifmoe_dist.studies.rehearsal.hosts import Network
from unifmoe_dist.studies.rehearsal.slow_link import Sizes, Timing, Trained

SMALL = Sizes(tokens=64, dim=72, experts_per_token=(8,), chunks=(1, 2), repeats=2, batch=4, steps=2)


@pytest.fixture
def slow_hosts():
    try:
        with Network() as network:
            network.limit(100)
            yield network
    except UserError as error:
        pytest.skip(str(error))


def test_the_link_is_limited_and_counts_what_crosses_it(slow_hosts):
    first_processes = [host.pid for host in slow_hosts.hosts]
    of_ranks = run_local_ranks(slow_link.RANKS, slow_link.time_exchanges, first_processes, 2, SMALL)
    timings = of_ranks[0]
    assert all(told == timings for told in of_ranks)
    assert list(timings) == ["exchange, k = 8", "layer"]
    flat, two_level = (timings["exchange, k = 8"][name] for name in ("flat", "two_level"))
    # Rows and their gradients: 64 tokens go from each of four ranks to both others there, or to one.
    row = 4 * 64 * 4 * 4 * 72
    assert 0.9 * row < two_level.link_bytes < 0.75 * flat.link_bytes and flat.link_bytes < 2.6 * row
    assert min(flat.seconds) > 8 * flat.link_bytes / 2 / 100e6 * 0.5  # a burst may pass at once
    assert list(timings["layer"]) == ["flat, 1", "flat, 2", "two_level, 1", "two_level, 2"]
    assert timings["layer"]["two_level, 1"].link_bytes < 0.75 * timings["layer"]["flat, 1"].link_bytes


@pytest.mark.slow
def test_the_rehearsal_of_a_slow_link(slow_hosts, tmp_path, capsys):
    slow_link_report.rehearse(tmp_path, 1000, SMALL)
    said = capsys.readouterr().out
    assert "all 2 losses of two_level within" in said and "two hosts, exchange, k = 8: two_level takes" in said
    assert (tmp_path / "slow-link.png").is_file() and (tmp_path / "slow-link.md").is_file()


def test_what_is_shown(tmp_path):
    def timing(milliseconds: float, megabytes: float = 0) -> Timing:
        return Timing([1e-3 * (milliseconds + i) for i in (-1, 0, 1)], 1e6 * megabytes)

    layer = {f"{name}, {chunks}": timing(30) for name in ("flat", "two_level") for chunks in (1, 2)}
    between = {"exchange, k = 4": {"flat": timing(100, 8), "two_level": timing(70, 5)}, "layer": layer}
    inside = {"exchange, k = 4": {**{n: timing(10) for n in ("flat", "two_level")}, "auto": timing(11)}, "layer": layer}
    trained = {"flat": Trained([2.0], timing(50, 3), 0.03), "two_level": Trained([2.0], timing(40, 2), 0.018)}
    timings = {2: between, 1: inside}
    table = slow_link_report.format_table(trained, timings)
    assert "| two hosts | exchange, k = 4 | two_level | 70 | 70 to 70 | 0.70 | 5.00 |" in table
    assert "| two hosts | of it the exchange, by a profile | two_level | 18 |  | 0.60 |  |" in table
    above, _, auto, *_ = slow_link_report.verdicts(timings)
    assert above == "two hosts, exchange, k = 4: two_level takes 0.70 of flat's time, above 0.6"
    assert auto == "one host, exchange, k = 4: two_level takes 1.00 of flat's time, within 1.05"
    assert slow_link_report.plot(trained, timings, 100, tmp_path / "plot.png").stat().st_size > 10_000


def test_a_machine_that_cannot_limit_a_link():
    network = Network()
    network.hosts = [SimpleNamespace(command=lambda words: ["sh", "-c", "echo 'tc: no such file' >&2; exit 1"])]
    with pytest.raises(UserError, match="link cannot be limited here .tc: no such file.; install iproute2's tc"):
        network.limit(100)


@pytest.mark.parametrize(
    "words,said",
    [
        (["slowlink"], "there is no scenario 'slowlink'; choose among cut, kill, slow, slow-link"),
        (["cut", "--megabits", "100"], "--megabits belongs to slow-link"),
        (["slow-link", "--megabits", "5"], "--megabits must be from 10 to 1000, not 5"),
    ],
)
def test_options_that_no_rehearsal_takes(words, said):
    with pytest.raises(UserError, match=said):
        rehearse.main(words)
