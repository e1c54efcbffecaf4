"""What is said while DeepSpeed's extensions are compiled, here or by another process."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unifmoe_dist.runtime import compiling


@pytest.fixture(params=["kept by the kernel", "there or not"])
def lock(tmp_path, monkeypatch, request) -> Path:
    """The lock of an extension "op", as later and as earlier versions of torch take it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(compiling, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(compiling, "_kernel_keeps_locks", lambda: request.param == "kept by the kernel")
    (tmp_path / "op").mkdir()
    return tmp_path / "op" / "lock"


@contextmanager
def held(lock: Path, left: bool = False) -> Iterator[None]:
    """Hold a lock in this process; one that is `left` stays afterwards as a killed process leaves it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    if not (left or compiling._kernel_keeps_locks()):
        lock.unlink()


@contextmanager
def held_by_another(lock: Path) -> Iterator[int]:
    """Hold a lock in a process that has another parent; its number."""
    program = (
        "import fcntl, os, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def wait_for(lines: list[str], number: int) -> None:
    limit = time.monotonic() + 20
    while len(lines) < number and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(lines) >= number, lines


def test_a_first_build_is_said_once(lock):
    lines: list[str] = []
    with compiling.announced("op", lines.append):
        with held(lock):
            wait_for(lines, 1)
            lock.with_name("op.so").touch()
            time.sleep(0.1)
        time.sleep(0.6)
    assert lines == ["compiling DeepSpeed's op: once per environment, about a minute"]


def test_a_build_of_another_process_is_said_after_a_while(lock):
    lines: list[str] = []
    with held_by_another(lock) as holder, compiling.announced("op", lines.append):
        assert not lines
        wait_for(lines, 1)
    assert lines[0].startswith("waiting for ") and "for another process that compiles DeepSpeed's op" in lines[0]
    assert f"process {holder} is at it; its lock is {lock}" in lines[0]


def test_a_build_by_a_rank_of_the_same_job_is_its_own(lock):
    with held(lock):
        assert compiling._is_held(lock) and not compiling._is_anothers(lock)
    assert not compiling._is_held(lock)


def test_a_lock_that_nobody_holds_may_be_deleted(lock):
    with held(lock, left=True):
        pass
    os.utime(lock, (time.time() - 60,) * 2)
    lines: list[str] = []
    with compiling.announced("op", lines.append):
        if compiling._kernel_keeps_locks():  # then the file says nothing, and nobody waits
            time.sleep(0.6)
        else:
            wait_for(lines, 1)
            assert f"delete {lock}" in lines[0]
    assert compiling._kernel_keeps_locks() == (not lines)


def test_nothing_is_said_of_what_is_there(lock):
    lines: list[str] = []
    lock.with_name("op.so").touch()
    with compiling.announced("op", lines.append):
        with held(lock):
            time.sleep(0.1)
        time.sleep(0.5)
    assert lines == []


def test_builds_for_another_torch_do_not_matter(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    other = tmp_path / f"py{sys.version_info.major}{sys.version_info.minor}_cu000" / "op" / "lock"
    other.parent.mkdir(parents=True)
    other.touch()
    assert compiling._lock("op") == Path(cpp_extension._get_build_directory("op", False)) / "lock" != other
    assert not compiling._is_held(compiling._lock("op"))


def test_torchs_own_lock_is_seen(tmp_path, monkeypatch):
    """As torch takes it, by its own class."""
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = compiling._lock("op")
    if compiling._kernel_keeps_locks():
        with cpp_extension.FileLock(str(lock)):
            assert compiling._is_held(lock) and compiling._holder(lock) == os.getpid()
    else:
        baton = cpp_extension.FileBaton(str(lock))
        assert baton.try_acquire() and compiling._is_held(lock) and compiling._holder(lock) == os.getpid()
        baton.release()
    assert not compiling._is_held(lock)


def test_one_rank_of_a_host_speaks(lock, monkeypatch, capsys):
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with held(lock), compiling.announced("op"):
            time.sleep(0.7)
        assert ("compiling" in capsys.readouterr().err) == (rank == "0")
