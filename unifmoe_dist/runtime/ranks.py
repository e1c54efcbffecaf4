"""The ranks of a job: start-up, tear-down, seeds and the expert-parallel groups.

torchrun's agent keeps one key-value store over all attempts of a job, and since torch 2.14 an attempt finds the
addresses that the dead ranks of the one before left there, under the same keys. So the ranks agree on a new word:

    rank r > 0:  hello/r = nonce                     waits for reply/<nonce> = word, then sets ack/<word>/r
    rank 0:      answers every nonce that it finds, of dead ranks too, until it has all acks of its word
"""

import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unifmoe_dist.config import ParallelConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.leaving import note_joined
from unifmoe_dist.runtime import failure, launchers

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int  # of all
    world_size: int
    device: torch.device
    expert_group: dist.ProcessGroup | None = None  # ranks that share one set of residual experts; None: each has all
    expert_rank: int = 0  # inside expert_group
    expert_replica: int = 0  # which copy of the set of experts this rank belongs to

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, as float64 on the CPU."""
        total = tensor.detach().to(device=self.device, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.cpu()

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's (picklable) value, in rank order, on every rank."""
        values: list[Any] = [value]
        if self.world_size > 1:
            values *= self.world_size
            dist.all_gather_object(values, value)
        return values

    def share(self, value: str | None) -> str:
        """Rank 0's string, on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]


def world_size_from_environment() -> int:
    """Number of ranks the launcher announced; 1 without a launcher."""
    launchers.identify()
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def running_ranks(
    expert_parallel_size: int,
    placement: str = "near",
    *,
    timeout_s: int = ParallelConfig.timeout_s,
    host_timeout_s: int = ParallelConfig.host_timeout_s,
) -> Iterator[Ranks]:
    """Join the job, yield this process's place in it, and tear down in one place.

    Args:
        expert_parallel_size: Ranks that share one set of residual experts; divides the world size.
        placement: "near" puts consecutive ranks into one expert-parallel group, so that the all-to-all stays inside a
            node where it can; "far" strides the groups over the job, so that the replicas of an expert are consecutive
            and the all-reduce of expert gradients stays inside a node instead; "balanced" groups ranks as "near".
        timeout_s: Seconds that a rank waits for the others to join, and in a collective.
        host_timeout_s: Seconds without an answer after which a host counts as lost.

    Raises:
        UserError: the ranks did not find one another.

    A program ends with `unifmoe_dist.leaving.leave`, as `run_main` does: the interpreter's own end may abort on gloo,
    after the work has succeeded.
    """
    launchers.identify()
    launchers.find_master()
    device, timeout = _own_device(), timedelta(seconds=timeout_s)
    cuda = device.type == "cuda"
    try:
        if not dist.is_initialized():
            size = int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=own_store(timeout),
                rank=int(os.environ["RANK"]),
                world_size=size,
                timeout=timeout,
                device_id=device if cuda and size > 1 else None,
            )
    except (dist.DistError, RuntimeError) as error:
        raise _not_joined(error, timeout_s) from error
    note_joined()
    place = Ranks(dist.get_rank(), dist.get_world_size(), device)
    if expert_parallel_size > 1:
        place = _with_experts(place, expert_parallel_size, placement, timeout)
    with failure.watched(place, host_timeout_s):
        yield place
        place.barrier()
    dist.destroy_process_group()  # but a rank that fails must not wait for the others: its caller exits at once


def _own_device() -> torch.device:
    """This rank's device, made ready."""
    if torch.cuda.is_available():
        alone = torch.cuda.device_count() == 1  # Slurm may show each task its own GPU only
        device = torch.device("cuda", 0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:  # ranks that each take every core slow one another down
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    launchers.choose_interface()
    return torch.device("cpu")


def _with_experts(place: Ranks, size: int, placement: str, timeout: timedelta) -> Ranks:
    """The place with its group; every rank makes all groups, as torch demands."""
    order = torch.arange(place.world_size)
    members = order.view(size, -1).T if placement == "far" else order.view(-1, size)  # a row holds one set of experts
    groups: list[Any] = [(dist.new_group(row, timeout=timeout), row) for row in members.tolist()]
    number, (own, row) = next((i, made) for i, made in enumerate(groups) if place.rank in made[1])
    return replace(place, expert_group=own, expert_rank=row.index(place.rank), expert_replica=number)


def own_store(timeout: timedelta) -> dist.Store | None:
    """A store that no earlier attempt has written to; None where a launcher gives a new one to every attempt.

    Raises:
        torch.distributed.DistError: not all ranks were there within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.PrefixStore("unifmoe", dist.TCPStore(address, port, size, is_master=False, timeout=timeout))
    word = _give(agents, size, timeout) if rank == 0 else _ask(agents, rank)
    return dist.PrefixStore(word, agents)


def _ask(store: dist.Store, rank: int) -> str:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{rank}", nonce)
    word = store.get(f"reply/{nonce}").decode()  # waits for it
    store.set(f"ack/{word}/{rank}", "")
    return word


def _give(store: dist.Store, size: int, timeout: timedelta) -> str:
    word, answered = secrets.token_hex(8), set()
    missing, limit = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in list(missing):
            if store.check([f"ack/{word}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]) and (nonce := store.get(f"hello/{rank}").decode()) not in answered:
                store.set(f"reply/{nonce}", word)
                answered.add(nonce)
        if time.monotonic() > limit:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not come")
        time.sleep(_POLL_SECONDS)
    return word


def _not_joined(error: Exception, seconds: int) -> Exception:
    """What to tell the user when the ranks could not be joined; the error itself if it is none of the known ones."""
    text = str(error)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if "EADDRINUSE" in text:
        return UserError(f"port {port} is in use; give the launcher another with --master_port.")
    if "connectFullMesh" in text:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the one that its host name means")
        return UserError(
            f"rank {rank} of {size} found rank 0, but cannot reach every other rank over its interface ({interface}); "
            "set GLOO_SOCKET_IFNAME to the interface that joins the hosts (ip -br address lists them), and let them "
            "connect to one another on any port."
        )
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return UserError(
            f"rank {rank} of {size} could not join the others at {address}:{port} within parallel.timeout_s {seconds} "
            f"({text.splitlines()[0]}); see that every rank was started, that {address} means the host of rank 0 on "
            "all hosts, and that no firewall is between them."
        )
    return error


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and have cuDNN choose deterministic algorithms, as DomainBed does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
