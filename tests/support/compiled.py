"""What DeepSpeed compiles on a CPU, compiled before any test: inside one, its time limit could end the compiler.

torch compiles again when a path of the environment differs, so only it knows whether there is anything to do.
`python -m tests.support.compiled` does it alone, beside the type checker, in `make test`.
"""

from __future__ import annotations

import os
import subprocess
import sys

DONE = "UNIFMOE_TESTS_COMPILED"


def own_folder() -> None:
    """Compile into the environment: those that share a folder would compile in turn, each for itself."""
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))


def compile_for_ranks() -> None:
    """Compile in a process of its own, unless it was done: workers of pytest-xdist, and tests in tests, inherit it."""
    if DONE not in os.environ:
        os.environ[DONE] = "1"
        subprocess.run([sys.executable, "-m", __name__], timeout=900, check=False)


def main() -> None:
    """An offloaded optimiser; with a GPU nothing."""
    import torch

    if torch.cuda.is_available():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    own_folder()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


if __name__ == "__main__":
    main()
