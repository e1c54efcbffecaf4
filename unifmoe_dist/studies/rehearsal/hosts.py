"""Hosts made of Linux namespaces: own network, addresses, host name, processes and /dev/shm; a switch joins them.

    node0 [eth0 10.77.0.1] ---.
    node1 [eth0 10.77.0.2] ---+--- bridge, in a namespace of its own

Nothing is named or changed outside these namespaces, and they end with the process that made them, however it ends:
the first process of each host reads a pipe from it, and the kernel ends a host with its first process.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from unifmoe_dist.errors import UserError

SUBNET = "10.77.0"

_OWN = ("--net", "--uts", "--mount", "--pid")
# $1: name, $2: file of names and addresses. `cat` ends when the pipe does.
_FIRST_PROCESS = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs shm /dev/shm && ip link set lo up'
    " && echo ready && exec cat >/dev/null"
)


class Host:
    """One host, named as in a file like /etc/hosts. Its commands share the machine's files and processors.

    `scratch` is a folder of the host's own, for temporary files.
    """

    def __init__(self, name: str, names: Path, scratch: Path) -> None:
        self.name, self._scratch = name, scratch
        scratch.mkdir(parents=True, exist_ok=True)
        self._process = _hold([*_OWN, "--mount-proc"], [name, str(names)])
        self.pid = psutil.Process(self._process.pid).children()[0].pid
        """The first process, as the outside numbers it: /proc/<pid>/ns holds the namespaces."""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` inside."""
        return ["nsenter", f"--target={self.pid}", *_OWN, "--wd=" + os.getcwd(), "--", *words]

    def start(self, words: Sequence[str], output: IO[str] | int | None = None, **variables: str) -> subprocess.Popen:
        """Start a command inside; its standard output and error go to `output`."""
        environment = {**os.environ, "TMPDIR": str(self._scratch), **variables}
        pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        return subprocess.Popen(self.command(words), env=environment, text=True, **pipes)

    def sent_bytes(self) -> int:
        """What its interface has sent so far, by its own count."""
        return sent_bytes(f"/proc/{self.pid}")

    def kill(self) -> None:
        """End every process of the host at once, as a power failure does, and its network with them."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


class Network(AbstractContextManager):
    """Context manager of `number` hosts, node0, node1, ..., joined by a switch.

    `quirks` are lines of /etc/hosts by host name, put before the others: Debian's installer, for one, lets a host's own
    name mean 127.0.1.1.

    Raises:
        UserError: the machine does not allow it, or lacks a program for it.
    """

    def __init__(self, number: int = 2, quirks: Mapping[str, str] | None = None) -> None:
        self._number, self._quirks = number, quirks or {}
        self._switch: subprocess.Popen | None = None
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        for program in ("unshare", "nsenter", "ip", "hostname"):
            if shutil.which(program) is None:
                raise UserError(f"there is no program {program} here; install util-linux, iproute2 and hostname.")
        self._folder = tempfile.TemporaryDirectory(prefix="unifmoe-hosts-")
        try:
            self._build(Path(self._folder.name))
        except BaseException as error:
            self.__exit__()
            if not isinstance(error, (subprocess.CalledProcessError, OSError)):
                raise
            said = str(getattr(error, "stderr", None) or error).strip()
            raise UserError(
                f"hosts cannot be made of namespaces here ({said}); run as root, or where unprivileged user "
                "namespaces are allowed."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.kill()
        if self._switch is not None:
            self._switch.communicate()  # closes the pipe
        self._folder.cleanup()

    def cut(self, host: Host) -> None:
        """Pull the host's cable out of the switch: its packets vanish, and nobody is told."""
        self._in_switch("ip", "link", "set", host.name, "down")

    def mend(self, host: Host) -> None:
        """Put the cable back."""
        self._in_switch("ip", "link", "set", host.name, "up")

    def limit(self, megabits: float) -> None:
        """Limit what every host sends, by a token bucket at its interface with a queue of up to 400 ms.

        Raises:
            UserError: the machine cannot.
        """
        shape = ["rate", f"{megabits}mbit", "burst", f"{max(32, megabits)}kbit", "latency", "400ms"]
        for host in self.hosts:
            try:
                _call(host.command(["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape]))
            except (OSError, subprocess.CalledProcessError) as error:
                said = str(getattr(error, "stderr", None) or error).strip()
                raise UserError(
                    f"the link cannot be limited here ({said}); install iproute2's tc, and run as root on a "
                    "kernel with sch_tbf."
                ) from error

    def slow(self, megabits: float, loss_percent: float) -> None:
        """Limit the rate of every link towards its host, with queues of up to 50 ms, and lose packets in the switch."""
        for host in self.hosts:
            shape = ["rate", f"{megabits}mbit", "burst", "32kbit", "latency", "50ms"]
            self._in_switch("tc", "qdisc", "replace", "dev", host.name, "root", "tbf", *shape)
        self._in_switch(
            "nft",
            "add table bridge rehearsal; add chain bridge rehearsal passing { type filter hook forward priority 0; }; "
            f"add rule bridge rehearsal passing numgen random mod 1000 lt {round(10 * loss_percent)} drop",
        )

    def _build(self, folder: Path) -> None:
        places = {f"node{i}": f"{SUBNET}.{i + 1}" for i in range(self._number)}
        known = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in places.items())
        self._switch = _hold(["--net"], [])
        self._in_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._in_switch("ip", "link", "set", "bridge", "up")
        for name, address in places.items():
            names = folder / f"{name}.hosts"
            names.write_text("\n".join([*filter(None, [self._quirks.get(name)]), known]))
            host = Host(name, names, folder / name)
            self.hosts.append(host)
            self._in_switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            self._in_switch("ip", "link", "set", name, "master", "bridge", "up")
            for words in (["address", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _call(host.command(["ip", *words]))

    def _in_switch(self, *words: str) -> None:
        assert self._switch is not None
        _call(["nsenter", f"--target={psutil.Process(self._switch.pid).children()[0].pid}", "--net", *words])


def enter(first_process: int) -> None:
    """Move this thread, and what it starts, into the network and under the name of a host; its files stay as they are.

    Raises:
        OSError: the kernel refused.
    """
    for kind in ("net", "uts"):
        with open(f"/proc/{first_process}/ns/{kind}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"the {kind} namespace of process {first_process} is closed")


def become_rank(first_processes: Sequence[int]) -> None:
    """Become a rank of a job spread evenly over hosts, given by first processes, as their launchers would start it."""
    rank, here = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // len(first_processes)
    enter(first_processes[rank // here])
    place = {"LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": f"{SUBNET}.1"}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if len(first_processes) > 1 else "lo"


def sent_bytes(process: str = "/proc/thread-self") -> int:
    """What eth0 of a process's network has sent so far."""
    (line,) = re.findall(r"^ *eth0: *(.*)$", Path(process, "net/dev").read_text(), re.M)
    return int(line.split()[8])


def _hold(namespaces: Sequence[str], arguments: Sequence[str]) -> subprocess.Popen:
    """Start the first process of new namespaces and wait until it has prepared them; it ends with its standard input.

    Raises:
        OSError: with what the failing program said.
    """
    script = _FIRST_PROCESS if arguments else "echo ready && exec cat >/dev/null"
    words = ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script, "sh", *arguments]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # In a session of its own: an interrupt from the keyboard is for the one that uses the hosts.
    process = subprocess.Popen(words, text=True, start_new_session=True, **pipes)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline().strip() != "ready":
        said = process.stderr.read().strip()
        process.wait()
        raise OSError(said or "unshare ended without a word")
    return process


def _call(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
