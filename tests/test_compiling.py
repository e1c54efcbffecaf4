"""What is said while DeepSpeed's extensions are compiled, here or by another process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from unifmoe_dist.engine import compiling


@pytest.fixture
def lock(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(compiling, "_POLL_SECONDS", 0.02)
    (tmp_path / "op").mkdir()
    return tmp_path / "op" / "lock"


def wait_for(lines: list[str], number: int) -> None:
    limit = time.monotonic() + 20
    while len(lines) < number and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(lines) >= number, lines


def test_a_first_build_is_said_once(lock):
    lines: list[str] = []
    with compiling.announced("op", lines.append):
        lock.touch()
        wait_for(lines, 1)
        lock.with_name("op.so").touch()
        time.sleep(0.1)
        lock.unlink()
        time.sleep(0.6)
    assert lines == ["compiling DeepSpeed's op: once per environment, about a minute"]


def test_a_build_of_another_process_is_said_after_a_while(lock):
    lines: list[str] = []
    with lock.open("w"):
        os.utime(lock, (time.time() - 60,) * 2)
        with compiling.announced("op", lines.append):
            assert not lines
            wait_for(lines, 1)
    assert lines[0].startswith("waiting for ") and "for another process that compiles DeepSpeed's op" in lines[0]
    assert f"process {os.getpid()} is at it; its lock is {lock}" in lines[0]


def test_a_lock_that_nobody_holds_may_be_deleted(lock):
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    lines: list[str] = []
    with compiling.announced("op", lines.append):
        wait_for(lines, 1)
    assert f"delete {lock}" in lines[0]


def test_nothing_is_said_of_what_is_there(lock):
    lines: list[str] = []
    lock.with_name("op.so").touch()
    with compiling.announced("op", lines.append):
        lock.touch()
        time.sleep(0.1)
        lock.unlink()
        time.sleep(0.5)
    assert lines == []


def test_torchs_own_folder_is_found(tmp_path, monkeypatch):
    """Where torch would put it, by its own word."""
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    folder = Path(cpp_extension._get_build_directory("op", False))
    (folder / "lock").touch()
    assert [lock for lock in compiling._locks("op") if lock.exists()] == [folder / "lock"]


def test_one_rank_of_a_host_speaks(lock, monkeypatch, capsys):
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with compiling.announced("op"):
            time.sleep(0.7)
        assert ("delete" in capsys.readouterr().err) == (rank == "0")
