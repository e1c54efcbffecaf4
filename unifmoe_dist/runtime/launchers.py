"""Which process of the job this is, whatever started it: deepspeed, torchrun, mpirun, srun, Kubeflow or nothing.

Everything downstream reads torch's own variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). deepspeed
and torchrun set all of them, Kubeflow and people all but LOCAL_RANK; what is lacking is filled in here.

So is the interface that gloo uses. It takes the address that the host's own name means; Debian and Ubuntu install with
127.0.1.1 for it, which no other host can reach, so the one is chosen that leads to rank 0.
"""

import os
import re
import socket

import psutil
import torch
import torch.distributed as dist

from unifmoe_dist.errors import UserError

# Variables of the rank, the rank on its node and the number of ranks. A launcher counts as present when all three are
# set; Open MPI and MPICH come first because, inside a Slurm job, they start their own daemons through srun.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH, Intel MPI
)
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")  # set by srun, not in a batch script
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_ADVICE = (
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process of a job, or for a job of one process "
    "unset them."
)
# Networks inside a host: containers and virtual machines. NCCL passes over the same.
_INSIDE = ("lo", "docker", "br-", "virbr", "veth", "podman", "cni")


def _started_by(variables: tuple[str, str, str]) -> bool:
    return all(name in os.environ for name in variables)


def identify() -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE from the launcher's own variables; a lone process is a job of one rank.

    Cheap: it touches no process group, so it may run before options are checked.

    Raises:
        UserError: variables are set that contradict each other, are no numbers, or lack one that belongs to them.
    """
    if "RANK" not in os.environ:
        for variables in (*_MPI, _SLURM):
            if _started_by(variables):
                os.environ.update({ours: os.environ[theirs] for ours, theirs in zip(_TORCH, variables, strict=True)})
                return
        if "WORLD_SIZE" in os.environ and _number("WORLD_SIZE", 1) > 1:
            raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but RANK is not set; {_ADVICE}")
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        return
    if "WORLD_SIZE" not in os.environ:
        raise UserError(f"RANK is {os.environ['RANK']}, but WORLD_SIZE is not set; {_ADVICE}")
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= size:
        raise UserError(f"RANK {rank} must be below WORLD_SIZE {size}; {_ADVICE}")
    least = 0 if size == 1 else 1  # a rank alone listens on any free port if told 0
    if "MASTER_PORT" in os.environ and _number("MASTER_PORT", least) > 65535:
        raise UserError(f"MASTER_PORT {os.environ['MASTER_PORT']} must be at most 65535; {_ADVICE}")
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0)
    else:
        os.environ["LOCAL_RANK"] = str(rank % _ranks_here())


def _number(name: str, least: int) -> int:
    """A variable as a whole number of at least `least`."""
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not {text!r}; {_ADVICE}")
    return int(text)


def _ranks_here() -> int:
    """Ranks that share this host, where LOCAL_RANK does not tell: consecutive ones, each with a GPU of its own."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return _number("LOCAL_WORLD_SIZE", 1)
    return torch.cuda.device_count() or 1


def find_master() -> None:
    """Set MASTER_ADDR and MASTER_PORT, where rank 0 will listen, unless the launcher did.

    Under MPI this asks rank 0 through mpi4py, so all ranks must call it.

    Raises:
        UserError: started by mpirun, but mpi4py is not installed or finds no MPI library; several ranks were started by
            nothing known, and have not joined yet.
    """
    absent = [name for name in _MASTER if not os.environ.get(name)]
    if not absent:
        return
    if any(_started_by(variables) for variables in _MPI):
        address, port = _ask_rank_0()
    elif _started_by(_SLURM):
        # The same on every rank without a message: the step's first node, and a port of this job's own.
        address = first_host(os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise UserError(f"RANK and WORLD_SIZE are set, but {' and '.join(absent)} not; {_ADVICE}")
    else:
        address, port = "127.0.0.1", free_port()
    for name, value in zip(_MASTER, (address, str(port)), strict=True):
        if name in absent:
            os.environ[name] = value


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: "gpu[03-05,9],login" -> "gpu03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # up to the first comma outside brackets
    if first is None:
        raise UserError(f"the Slurm node list {nodes!r} names no host; set MASTER_ADDR to the first node's address.")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _ask_rank_0() -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError):
            why = "mpi4py is not installed; `pip install 'unifmoe-dist[mpi]'`"
        else:
            why = f"mpi4py finds no MPI library ({str(error).splitlines()[0]}); install one"
        raise UserError(
            f"the job was started by mpirun, but {why}, or set MASTER_ADDR and MASTER_PORT to an address and free port "
            "of the first node."
        ) from error
    mine = (outward_address(), free_port()) if MPI.COMM_WORLD.Get_rank() == 0 else None
    return MPI.COMM_WORLD.bcast(mine, root=0)


def free_port() -> int:
    """A TCP port of this host that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME for a job on several hosts, unless it is set. Needs MASTER_ADDR and MASTER_PORT."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if "GLOO_SOCKET_IFNAME" in os.environ or here == os.environ.get("WORLD_SIZE"):
        return
    address = _address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if address is None:
        return  # joining will say so
    if _is_loopback(address):
        if here is None:  # nobody says that there are other hosts, and rank 0 is on this one
            return
        address = outward_address()
    name = _interface_of(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def outward_address() -> str:
    """An address of this host that other hosts can reach: that of its name, or else of its first outward interface.

    Loopback if it has none.
    """
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if not _is_loopback(named):
        return named
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name.partition(":")[0])  # a second address may have a name of its own: eth0:1
        if state is not None and state.isup and not name.startswith(_INSIDE):
            for entry in addresses:
                if entry.family == socket.AF_INET:
                    return entry.address
    return named


def _address_towards(host: str, port: int) -> str | None:
    """The own address from which packets to `host` leave. Sends none."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses) and not _is_loopback(address):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
