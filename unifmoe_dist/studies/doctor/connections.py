"""How ranks find and reach one another."""

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil

from unifmoe_dist.runtime.launchers import free_port
from unifmoe_dist.studies.doctor.findings import Finding, expect, note, ok, problem, version_of

PORT = 29500
"""Where deepspeed and torchrun have rank 0 listen unless they are told otherwise."""
SECONDS = 60.0
"""For a sum over ranks, start of the processes included."""
ADD_UP = """
import datetime, os, sys, torch, torch.distributed as dist
backend, (rank, size, port) = sys.argv[1], map(int, sys.argv[2:])
dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=30), world_size=size, rank=rank)
value = torch.full((1024,), rank + 1.0, device=torch.device("cuda", rank) if backend == "nccl" else "cpu")
dist.all_reduce(value)
right = bool((value == size * (size + 1) / 2).all())
dist.destroy_process_group()
print("" if right else "the sum over ranks is wrong", file=sys.stderr, flush=True)
os._exit(not right)  # an interpreter that goes down around gloo's threads may abort
"""


def names() -> Iterator[Finding]:
    """Whether this host's name leads to it from outside: backends may listen where it points to."""
    name = socket.gethostname()
    advice = f"for several nodes: have {name} stand for this host's address in DNS or /etc/hosts, not for loopback's"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield note("host name", f"{name} has no address", f"{advice}; else backends wait for the name, or give up")
        return
    hidden = ipaddress.ip_address(address).is_loopback
    text = f"{name} is {address}" + (", which other hosts cannot reach" if hidden else "")
    yield expect(not hidden, "host name", text, f"{advice}; else ranks hang")


def interfaces() -> Iterator[Finding]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in up and not ipaddress.ip_address(address.address).is_loopback
    }
    text = ", ".join(f"{name} {address}" for name, address in found.items())
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        given = os.environ.get(variable, "")
        wanted = tuple(given.lstrip("=").split(","))
        if given and not given.startswith("^") and not any(name.startswith(wanted) for name in up):
            advice = f"`unset {variable}`, or name one of {', '.join(sorted(up))}"
            yield problem("interfaces", f"{variable} is {','.join(wanted)}, which is not up here", advice)
    if not found:
        yield note("interfaces", "none but loopback is up", "fine for one machine")
    elif len(found) > 1:
        first = next(iter(found))
        advice = f"if ranks on several nodes hang: `export NCCL_SOCKET_IFNAME={first} GLOO_SOCKET_IFNAME={first}`"
        yield note("interfaces", text, f"{advice}, with the one that joins the nodes")
    else:
        yield ok("interfaces", text)


def port() -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", PORT))
            text = "is free"
        except OSError:
            text = "is in use"
    advice = f"another job listens there: `deepspeed --master_port {PORT + 1} launch/train.py`"
    yield expect(text == "is free", "port", f"{PORT}, the launchers' default, {text}", advice)


def launcher_variables() -> Iterator[Finding]:
    """A launcher's variables in a shell: a single process would take itself for a rank and wait for the others."""
    left = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in os.environ]
    if left:
        text = f"{', '.join(left)} set here, outside a launcher"
        advice = f"`unset {' '.join(left)}`, or a single process waits for ranks that never come"
        yield note("environment", text, advice)


def backends() -> Iterator[Finding]:
    """A real sum over two CPU ranks, and over all GPUs."""
    if version_of("torch") is None:
        return
    import torch
    import torch.distributed as dist

    advice = "a firewall between local processes, or the host name above: `export GLOO_SOCKET_IFNAME=lo` tells"
    if dist.is_gloo_available():
        yield _summed("gloo", 2, advice)
    else:
        yield problem("gloo", "not in this torch", "install a usual build of torch: CPU ranks need it")
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            advice = "`export NCCL_DEBUG=INFO` tells more; `export NCCL_P2P_DISABLE=1` if GPUs cannot reach one another"
            yield _summed("nccl", torch.cuda.device_count(), advice)
        else:
            yield problem("NCCL", "not in this torch", "install a CUDA build of torch for Linux")


def _summed(backend: str, world_size: int, advice: str) -> Finding:
    """Whether `world_size` new processes agree on a sum."""
    import torch

    name = {"nccl": "NCCL"}.get(backend, backend)
    place = str(free_port())
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    def join(rank: int) -> subprocess.CompletedProcess:
        words = [sys.executable, "-c", ADD_UP, backend, str(rank), str(world_size), place]
        return subprocess.run(words, env=clean, capture_output=True, text=True, timeout=SECONDS)

    try:
        with ThreadPoolExecutor(world_size) as pool:
            ended = list(pool.map(join, range(world_size)))
    except subprocess.TimeoutExpired:
        return problem(name, f"a sum over {world_size} ranks did not come within {SECONDS:g} s", advice)
    if any(process.returncode for process in ended):
        said = (line.strip() for process in ended for line in reversed(process.stderr.splitlines()))
        return problem(name, f"a sum over {world_size} ranks failed: {next(filter(None, said), 'no word')}", advice)
    version = ".".join(map(str, torch.cuda.nccl.version())) + ": " if backend == "nccl" else ""
    return ok(name, f"{version}a sum over {world_size} rank{'s' * (world_size > 1)} is right")
