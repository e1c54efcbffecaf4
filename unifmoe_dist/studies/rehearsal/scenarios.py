"""What a cluster does to a job, done to a small training run whose experts are sharded over the hosts.

With two ranks on a host these travel by `two_level`, which finds the nodes by the hosts' names.

Every scenario is judged by the losses: however often it was stopped, a run must end with those of an undisturbed one.
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import psutil

from unifmoe_dist.errors import UserError
from unifmoe_dist.resources import script
from unifmoe_dist.studies.records import read_metrics
from unifmoe_dist.studies.rehearsal.hosts import Host, Network

PORT = 29400
RUN_SECONDS = 300.0  # for a run, or to its first checkpoint
ENDS_SECONDS = 60.0  # within which every rank must have ended, and said why
# Small, so that a run takes seconds. The batch divides over one host as well as over all.
OPTIONS = (
    "--steps 60 --eval_every 10 --log_every 1 --progress false --baseline false --model.layers [1,3] "
    "--model.num_experts 4 --data.batch_size 8 --optim.warmup_steps 10 --resume auto "
    "--parallel.expert_parallel_size auto"
).split()
say = partial(print, flush=True)


class Job(AbstractContextManager):
    """Context manager of a training run on some hosts, started by torchrun on every one.

    Args:
        hosts: Where it runs; the first one holds the rendezvous.
        run: Folder of the run, which all hosts share.
        ranks: On each host.
    """

    def __init__(self, hosts: Sequence[Host], run: Path, ranks: int = 1) -> None:
        self.hosts, self.run = hosts, run
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks}"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:{PORT}"]
        words += [str(script("train")), *OPTIONS, "--output", str(run)]
        number = len(list(run.parent.glob(f"{run.name}-*.log")))
        self.logs = [run.with_name(f"{run.name}-{number + i:02d}-{host.name}.log") for i, host in enumerate(hosts)]
        self._processes = []
        run.parent.mkdir(parents=True, exist_ok=True)
        for host, log in zip(hosts, self.logs, strict=True):
            with log.open("w") as output:
                self._processes.append(host.start(words, output, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"))

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for_checkpoint(self, seconds: float = RUN_SECONDS) -> None:
        """Wait until the run has one, and a step or two more."""
        pointer, limit = self.run / "checkpoints" / "latest", time.monotonic() + seconds
        while not pointer.is_file():
            if time.monotonic() > limit or any(process.poll() for process in self._processes):
                raise UserError(f"the run did not get to its first checkpoint; see {self.logs[0]}.")
            time.sleep(0.05)
        time.sleep(0.3)

    def wait_for_ranks(self) -> float:
        """Wait until a rank of every host that is still there has said why it stops; returns the seconds."""
        started = time.monotonic()
        while any(s is None and p.poll() is None for s, p in zip(self._sentences(), self._processes, strict=True)):
            if time.monotonic() - started > ENDS_SECONDS:
                raise UserError(f"a rank still hangs {ENDS_SECONDS:.0f} s after the event; see {self.run.parent}.")
            time.sleep(0.1)
        return time.monotonic() - started

    def finish(self, seconds: float) -> list[tuple[int | None, float]]:
        """Wait for every launcher, and kill those that have not ended after so long.

        Returns:
            By host the launcher's exit status, None if it had to be killed, and the seconds until its end.
        """
        started, ends = time.monotonic(), dict[int, float]()
        while len(ends) < len(self._processes) and (passed := time.monotonic() - started) < seconds:
            done = [i for i, process in enumerate(self._processes) if process.poll() is not None]
            ends = dict.fromkeys(done, passed) | ends
            time.sleep(0.05)
        statuses = [process.poll() for process in self._processes]
        self.kill()
        return [(status, ends.get(i, seconds)) for i, status in enumerate(statuses)]

    def complete(self) -> None:
        """Run to the end, undisturbed."""
        for host, log, (status, _) in zip(self.hosts, self.logs, self.finish(RUN_SECONDS), strict=True):
            if status is None:
                raise UserError(
                    f"the job on {host.name} did not end within {RUN_SECONDS:.0f} s, where two minutes are enough on "
                    f"two idle cores; end what else runs here, or see {log}."
                )
            if status != 0:
                raise UserError(f"the job failed on {host.name} (status {status}); see {log}.")

    def fail(self) -> None:
        """Wait for the end of a job that was disturbed, and say how it ended; it must not have succeeded."""
        ends = self.finish(ENDS_SECONDS)
        for host, sentence, (status, seconds) in zip(self.hosts, self._sentences(), ends, strict=True):
            how = f"ended with status {status}" if status is not None else "killed, as it still ran"
            say(f"  {host.name}: {sentence or 'no rank is left to say anything'}")
            say(f"  {host.name}: launcher {how} after {seconds:.1f} s")
            if status == 0:
                raise UserError(f"the job on {host.name} ended as if nothing had happened.")

    def kill(self) -> None:
        """End what is left of it: the launchers and all that they started, and nothing by its place."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    for started in psutil.Process(process.pid).children(recursive=True):
                        started.kill()
                process.kill()
                process.wait()

    def _sentences(self) -> list[str | None]:
        """By host, why its first rank to stop did, if another was the cause."""
        texts = (log.read_text(errors="replace") for log in self.logs)
        found = (re.search(r"^rank \d+ stops because .*$", text, re.M) for text in texts)
        return [match.group() if match else None for match in found]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(run) if record["kind"] == "train"}


def whole(network: Network, run: Path, ranks: int) -> None:
    """two hosts, experts sharded over both"""
    with Job(network.hosts, run, ranks) as job:
        job.complete()


def cut(network: Network, run: Path, ranks: int) -> None:
    """the second host's cable is pulled in mid-run, put back, and the same command run again"""
    with Job(network.hosts, run, ranks) as job:
        job.wait_for_checkpoint()
        network.cut(network.hosts[1])
        say("  cable pulled; packets now vanish")
        say(f"  the ranks of both hosts had said why they stop after {job.wait_for_ranks():.1f} s")
        network.mend(network.hosts[1])
        say("  cable put back")
        job.fail()
    whole(network, run, ranks)


def kill(network: Network, run: Path, ranks: int) -> None:
    """the second host dies in mid-run, and the first goes on alone with the same options"""
    with Job(network.hosts, run, ranks) as job:
        job.wait_for_checkpoint()
        network.hosts[1].kill()
        say("  every process of node1 killed")
        job.fail()
    with Job(network.hosts[:1], run, ranks) as job:
        job.complete()


def slow(network: Network, run: Path, ranks: int) -> None:
    """100 Mbit/s, queues of up to 50 ms, one packet in a hundred lost"""
    slow_down(network)
    whole(network, run, ranks)


def slow_down(network: Network) -> None:
    """Slow the network.

    Raises:
        UserError: the machine cannot.
    """
    try:
        network.slow(megabits=100, loss_percent=1)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise UserError(
            f"the network cannot be slowed here ({said}); install nftables, or rehearse cut and kill."
        ) from error


SCENARIOS = {"cut": cut, "kill": kill, "slow": slow}


def rehearse(names: Sequence[str], folder: Path, ranks: int = 1) -> None:
    """Run scenarios over new hosts, after an undisturbed run, and say what happens; runs and logs go into the folder.

    Every host has `ranks` ranks.

    Raises:
        UserError: a job did not do what it must, or the machine cannot; the sentence says what.
    """
    if "slow" in names:  # what it needs is tried first: it comes after minutes of other scenarios
        with Network() as network:
            slow_down(network)
    expected: dict[int, float] = {}
    for name, scenario in (("undisturbed", whole), *((name, SCENARIOS[name]) for name in names)):
        say(f"{name}: {scenario.__doc__}")
        started, run = time.monotonic(), folder / name
        with Network() as network:
            scenario(network, run, ranks)
        found = losses(run)
        expected = expected or found
        if found.keys() != expected.keys():
            raise UserError(f"{name}: {len(found)} of {len(expected)} steps are in {run / 'metrics.jsonl'}.")
        worst = max(abs(found[step] - loss) for step, loss in expected.items())
        seconds = time.monotonic() - started
        say(f"  all {len(found)} losses within {worst:.1e} of the undisturbed run's; {seconds:.0f} s in all")
        if worst > 1e-4:
            raise UserError(f"{name}: the losses differ from the undisturbed run's by {worst:.1e}.")
