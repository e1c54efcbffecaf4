"""few_rows.c as functions: compiled once a machine, in under a second, and kept in ~/.cache/unifmoe_dist."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

from unifmoe_dist.files import user_cache

_SOURCE = Path(__file__).with_name("few_rows.c")
_SIGNATURES = {  # addresses, then sizes, as in the source
    "route": "aaa nnnn aaaaaa",
    "plan": "aa nnnn aa",
    "up": "aaa nnnn aaaaa n",
    "down": "aaaa nnnnn aaaaa n",
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where there is no C compiler, or it does not take the source."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = _digest(f"{platform.machine()} {compiler}".encode() + _SOURCE.read_bytes())
    try:
        return _loaded(_built(compiler, user_cache("kernels"), source))
    except (OSError, RuntimeError):  # no home, or none to write to
        try:
            with tempfile.TemporaryDirectory() as folder:
                return _loaded(_built(compiler, Path(folder), source))
        except OSError:
            return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _built(compiler: str, root: Path, source: str) -> Path:
    """The library in a folder, compiled unless it is there. Raises OSError where that fails.

    Its name tells what it was made of and what it holds: a damaged file, once loaded, would end the process.
    """
    for path in root.glob(f"few_rows-{source}-*.so"):
        if path.is_file() and path.stem.endswith(_digest(path.read_bytes())):
            return path
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:  # processes of a job may start together
        made = Path(folder) / "few_rows.so"
        command = [compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", str(_SOURCE), "-o", str(made), "-lm"]
        for threads in (["-fopenmp"], []):  # Apple's compiler has no OpenMP
            if subprocess.run([*command, *threads], capture_output=True, check=False).returncode == 0:
                path = root / f"few_rows-{source}-{_digest(made.read_bytes())}.so"
                os.replace(made, path)
                return path
    raise OSError(f"{compiler} does not compile {_SOURCE}")


def _loaded(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = [c_void_p if kind == "a" else c_int64 for kind in arguments.replace(" ", "")]
        function.restype = c_int64 if name == "plan" else None
    return loaded
