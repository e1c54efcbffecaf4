"""Which address and interface of this host the other hosts of a job can reach.

gloo takes the address that the host's own name means. Debian and Ubuntu install with 127.0.1.1 for it, which no other
host can reach, so the interface is chosen here instead: the one that leads to rank 0.
"""

from __future__ import annotations

import os
import socket

import psutil

# Networks inside a host: containers and virtual machines. NCCL passes over the same.
_INSIDE = ("lo", "docker", "br-", "virbr", "veth", "podman", "cni")


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
