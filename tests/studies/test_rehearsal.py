"""Jobs on several hosts, which are Linux namespaces here: cut cables, dead hosts, and restarts."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from launch import rehearse
from tests.support.faults import SMALL, die, on_call
from tests.support.jobs import ROOT, Job, RunningJob, environment, free_port
from tests.support.two_hosts import network_of_two  # noqa: F401  the fixture two_hosts
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime import launchers, ranks
from unifmoe_dist.studies.rehearsal import scenarios
from unifmoe_dist.studies.rehearsal.hosts import Network
from unifmoe_dist.studies.rehearsal.scenarios import Job as RehearsedJob
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.cli import parse_train_config

WORDS = [
    *SMALL,
    "--steps",
    "8",
    "--resume",
    "auto",
    "--parallel.expert_parallel_size",
    "auto",
    "--parallel.host_timeout_s",
    "5",
]


def words(folder: Path, *more: str) -> list[str]:
    return [*WORDS, "--output", str(folder / "run"), *more]


def losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


# -- two hosts ----------------------------------------------------------------------------------------------------


def wait_until(there: Path) -> None:
    limit = time.monotonic() + 60
    while not there.exists() and time.monotonic() < limit:
        time.sleep(0.01)


def move(rank: int, first_processes: list[int], pause: str | None = None, here: int = 1) -> None:
    """Become one of `here` ranks of a host, as if a launcher there had started it. Step 5 waits for `pause`/go."""
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{first_processes[rank // here]}/ns/{kind}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)  # numbers processes as this one is numbered
    os.environ.update(LOCAL_RANK=str(rank % here), LOCAL_WORLD_SIZE=str(here))
    os.environ.update(MASTER_ADDR="node0", MASTER_PORT="29500")

    def wait() -> None:
        Path(pause, "there").touch()
        wait_until(Path(pause, "go"))

    if pause is not None and rank == 1:
        on_call(TrainBatches, "step", 5, wait)


def start(folder: Path, hosts: Network, *pause: str) -> RunningJob:
    return RunningJob(folder, 2, words(folder), move, [host.pid for host in hosts.hosts], *pause)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of an undisturbed run on two ranks of one host."""
    folder = tmp_path_factory.mktemp("whole")
    assert RunningJob(folder, 2, words(folder)).finish().statuses == [0, 0]
    return losses(folder)


def test_a_cut_cable_ends_the_job_and_it_goes_on_when_mended(two_hosts, whole, tmp_path):
    job = start(tmp_path, two_hosts, str(tmp_path))
    wait_until(tmp_path / "there")
    two_hosts.cut(two_hosts.hosts[1])
    (tmp_path / "go").touch()
    cut = time.monotonic()
    ended = job.finish()
    assert time.monotonic() - cut < 20 and ended.statuses == [1, 1]
    for rank in (0, 1):  # both are cut off, each from the other
        sentence = f"rank {rank} stops because rank {1 - rank} on node{1 - rank} no longer answers"
        assert ended.outputs[rank].count(sentence) == 1
    assert "Traceback" not in ended.output
    two_hosts.mend(two_hosts.hosts[1])
    assert start(tmp_path, two_hosts).finish().statuses == [0, 0]
    assert losses(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.parametrize("event", ["cut", "kill"])
def test_two_hosts_of_two_ranks_that_lose_one_another(event, two_hosts, whole, tmp_path):
    """Experts travel by `two_level`, which `auto` takes here; what is left goes on flat."""
    pids = [host.pid for host in two_hosts.hosts]
    job = RunningJob(tmp_path, 4, words(tmp_path), move, pids, str(tmp_path), 2)
    wait_until(tmp_path / "there")
    if event == "cut":
        two_hosts.cut(two_hosts.hosts[1])
    else:
        for process in job.processes[2:]:
            process.kill()
    (tmp_path / "go").touch()
    ended = job.finish()
    assert ended.statuses[:2] == [1, 1] and "Traceback" not in "".join(ended.outputs[:2])
    for rank in (0, 1):
        assert ended.outputs[rank].count(f"rank {rank} stops because rank ") == 1
    rest = RunningJob(tmp_path, 2, words(tmp_path)).finish()
    assert rest.statuses == [0, 0]
    assert losses(tmp_path) == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_a_slow_network_that_loses_packets_changes_nothing(two_hosts, whole, tmp_path):
    try:
        two_hosts.slow(megabits=200, loss_percent=1)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the kernel has no token bucket, or nftables no bridge")
    assert start(tmp_path, two_hosts).finish().statuses == [0, 0]
    assert losses(tmp_path) == whole


def test_a_machine_that_cannot_slow_its_network_says_so_before_anything_runs(two_hosts, tmp_path, monkeypatch, capsys):
    """It was found out after minutes of cut and kill."""

    def without_nft(*_: object, **__: object) -> None:
        raise FileNotFoundError("nft")

    monkeypatch.setattr(Network, "slow", without_nft)
    with pytest.raises(UserError, match="cannot be slowed here .nft.; install nftables"):
        rehearse.main(["cut", "slow", "--output", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists() and not capsys.readouterr().out


def hide_folder(rank: int, first_processes: list[int], folder: str) -> None:
    move(rank, first_processes)
    if rank == 1:
        subprocess.run(["mount", "-t", "tmpfs", "own", folder], check=True)


def test_hosts_that_do_not_share_the_folder_are_told(two_hosts, tmp_path):
    (tmp_path / "run").mkdir()
    pids = [host.pid for host in two_hosts.hosts]
    job = RunningJob(tmp_path, 2, words(tmp_path), hide_folder, pids, str(tmp_path / "run")).finish()
    assert job.statuses == [2, 2] and "run on node1 is not the folder" in job.output and "Traceback" not in job.output
    assert "config.yaml" not in os.listdir(tmp_path / "run")


def test_hosts_leave_nothing_behind(two_hosts, tmp_path):
    process = two_hosts.hosts[1].start(["sleep", "1000"])
    two_hosts.__exit__(None, None, None)
    assert process.wait(5) != 0
    assert not any(Path(f"/proc/{host.pid}").exists() for host in two_hosts.hosts)


# -- restarts -----------------------------------------------------------------------------------------------------

FAULTY = """
import os, signal, sys
sys.path.insert(0, {launch!r})
import train
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.cli import run_main
step = TrainBatches.step
def faulty(self, number):
    if number == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number)
TrainBatches.step = faulty
run_main(train.main)
"""


class Here:
    """A host whose launcher has started a process; commands in it may reach others, so there are none."""

    name = "here"

    def start(self, words, output, **variables) -> subprocess.Popen:
        return subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)


def test_a_job_of_a_rehearsal_ends_with_what_it_started(tmp_path):
    job = RehearsedJob([Here()], tmp_path / "run")
    with job._processes[0].stdout as said:
        started = psutil.Process(int(said.readline()))
        job.kill()
    assert job._processes[0].returncode is not None
    assert psutil.wait_procs([started], timeout=5)[1] == [] or started.status() == psutil.STATUS_ZOMBIE


def test_a_run_that_takes_too_long_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "RUN_SECONDS", 0.2)
    with RehearsedJob([Here()], tmp_path / "run") as job, pytest.raises(UserError, match="here did not end within 0 s"):
        assert job._processes[0].stdout.readline()
        job.complete()


def test_a_user_who_may_not_rehearse(monkeypatch):
    refused = subprocess.CompletedProcess([], 1, "", "unshare: Operation not permitted")
    monkeypatch.setattr(rehearse, "os", SimpleNamespace(geteuid=lambda: 1000, execvp=None))
    monkeypatch.setattr(rehearse.subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(UserError, match="may not make namespaces .unshare: Operation not permitted.; run as root"):
        rehearse.main(["cut"])


@pytest.mark.slow
def test_torchrun_restarts_a_run_by_itself(whole, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(launch=str(ROOT / "launch")))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--master-port",
        str(free_port()),
        str(tmp_path / "faulty.py"),
        *words(tmp_path),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=240
    )
    # torchrun looks every 0.1 s and may end rank 0 before it has said why it stops
    assert done.returncode == 0 and done.stdout.count("rank 0 stops because rank 1 was lost") <= 1, done.stdout
    assert "exitcode: -9) local_rank: 1" in done.stdout, done.stdout
    assert losses(tmp_path) == whole


def test_ranks_that_start_again_do_not_meet_the_dead():
    """torchrun's store still holds what the ranks of the attempt before wrote, here at their worst moments."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    with ThreadPoolExecutor(3) as pool:
        for attempt in range(3):
            clients = [dist.PrefixStore("x", store.clone()) for _ in range(3)]
            clients[1].set("hello/1", f"dead {attempt}")  # asked, and died before the answer
            clients[2].set("ack/dead/2", "")
            given = pool.submit(ranks._give, clients[0], 3, timedelta(seconds=20))
            asked = [pool.submit(ranks._ask, clients[rank], rank) for rank in (1, 2)]
            assert {future.result() for future in asked} == {given.result()}
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1\] did not come"):
        ranks._give(store, 2, timedelta(seconds=0))


def kill_rank_1(rank: int) -> None:
    if rank == 1:
        on_call(TrainBatches, "step", 5, die)


def test_one_rank_goes_on_where_two_were(whole, tmp_path):
    assert RunningJob(tmp_path, 2, words(tmp_path), kill_rank_1).finish().statuses == [1, -9]
    job: Job = RunningJob(tmp_path, 1, words(tmp_path)).finish()
    assert job.statuses == [0]
    assert losses(tmp_path) == pytest.approx(whole, abs=1e-5)
    assert json.loads((tmp_path / "run/summary.json").read_text())["expert_parallel_size"] == 1


def kill_at_once(rank: int) -> None:
    on_call(TrainBatches, "step", 2, die)


def test_a_restart_begins_anew_or_goes_on(tmp_path):
    others = [tmp_path / "run" / name for name in ("checkpoints/model.pt", "tensorboard/events", "notes.txt")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    more = ["--steps", "2", "--optim.lr", "0.001"]
    assert RunningJob(tmp_path, 1, words(tmp_path, *more), kill_at_once).finish().statuses == [-9]
    assert (tmp_path / "run/config.yaml").exists() and len(losses(tmp_path)) == 1
    config = parse_train_config(words(tmp_path, "--steps", "2"))
    assert config.optim.lr == TrainConfig().optim.lr  # not that of the attempt that left nothing
    assert RunningJob(tmp_path, 1, words(tmp_path, "--steps", "2")).finish().statuses == [0]
    assert list(losses(tmp_path)) == [1, 2]
    assert "0.001" in (tmp_path / "run/config-1.yaml").read_text() and (tmp_path / "run/metrics-1.jsonl").exists()
    assert all(path.exists() for path in others)  # whatever else is in the folder is not the run's

    for pointer in ("latest", "best"):  # as if killed before it could name its first checkpoint
        (tmp_path / "run/checkpoints" / pointer).unlink()
    assert checkpoint.latest(tmp_path / "run").name == "step-000002"
    assert RunningJob(tmp_path, 1, words(tmp_path, "--steps", "3")).finish().statuses == [0]
    assert list(losses(tmp_path)) == [1, 2, 3] and checkpoint.latest(tmp_path / "run").name == "step-000003"


@pytest.mark.parametrize(
    "world,experts,moe,expected",
    [(8, 6, "unif", 2), (4, 8, "unif", 4), (3, 8, "unif", 1), (1, 6, "unif", 1), (8, 6, "mass", 8), (8, 6, "none", 1)],
)
def test_the_largest_expert_parallel_size_that_fits(world, experts, moe, expected):
    given = ["--model.num_experts", str(experts), "--model.moe", moe, "--data.batch_size", "24"]
    config = parse_train_config([*given, "--parallel.expert_parallel_size", "auto"])
    config.validate(world)
    assert config.expert_parallel_size(world) == expected


def test_timeouts_that_contradict_each_other():
    with pytest.raises(UserError, match="host_timeout_s 900 must be from 5 to parallel.timeout_s 600"):
        parse_train_config(["--parallel.host_timeout_s", "900"]).validate(1)


@pytest.mark.parametrize("name,value", [("timeout_s", 10**12), ("host_timeout_s", 100_000)])
def test_timeouts_that_no_system_counts(name, value):
    with pytest.raises(UserError, match=f"parallel.{name} must be at most"):
        parse_train_config(["--parallel.timeout_s", "100000", f"--parallel.{name}", str(value)]).validate(1)


def wait_for_nobody(rank: int) -> None:
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


@pytest.mark.slow
def test_a_rank_that_finds_nobody_says_so(tmp_path):
    options = ["--parallel.timeout_s", "5", "--parallel.expert_parallel_size", "1"]
    job = RunningJob(tmp_path, 1, words(tmp_path, *options), wait_for_nobody).finish()
    assert job.statuses == [2] and "Traceback" not in job.output
    assert "error: rank 1 of 2 could not join the others at 127.0.0.1:" in job.output


def test_a_single_host_keeps_its_interface(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"})
    launchers.choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_second_addresses_of_an_interface(monkeypatch):
    def entry(address: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET, address=address)

    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(launchers.psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    addresses = {"gone0": [entry("10.0.0.1")], "eth0:1": [entry("10.0.0.2")], "eth0": [entry("10.0.0.3")]}
    monkeypatch.setattr(launchers.psutil, "net_if_addrs", lambda: addresses)
    assert launchers.outward_address() == "10.0.0.2"
