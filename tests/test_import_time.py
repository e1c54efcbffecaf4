"""What is imported when: help and mistakes in options need no PyTorch, and the layer no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

HELP = """
import contextlib, io, runpy, sys
from pathlib import Path

def heavy():
    return {"torch", "deepspeed", "transformers", "matplotlib", "timm", "datasets"} & sys.modules.keys()

import unifmoe_dist
assert not heavy(), heavy()
from unifmoe_dist import console
sys.argv = ["unifmoe", "--help"]
console.main()
assert not heavy(), heavy()
sys.path.insert(0, "launch")
for path in sorted(Path("launch").glob("[a-z]*.py")):
    for words in (["--help"], ["--no-such-option"])[: 1 if path.stem == "main_job" else 2]:  # it hands options on
        sys.argv = [str(path), *words]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                runpy.run_path(str(path), run_name="__main__" if words == ["--help"] else "imported")["main"](words)
            except BaseException as error:
                assert isinstance(error, (SystemExit, unifmoe_dist.errors.UserError)), (path, words, error)
        assert not heavy(), (path.name, words, heavy())
    print(path.stem)
"""

LAYER = """
import sys
import torch
import unifmoe_dist
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, diversity_loss, upcycle
layer = UniFMoELayer(UniFMoEConfig(8, 16, 4, 4))
(layer(torch.randn(5, 8)).sum() + layer.diversity_loss()).backward()
assert unifmoe_dist.kernels.use_kernels and unifmoe_dist.routing.Router  # as after importing everything
found = {"torch._dynamo", "torch._inductor", "transformers", "timm", "deepspeed", "sympy"} & sys.modules.keys()
assert not found, found
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_mistakes_in_options_import_no_torch():
    assert {"train", "sweep", "scale", "evaluate", "analyze", "doctor"} <= set(run(HELP).split())


def test_the_layer_and_upcycling_import_no_compiler():
    run(LAYER)


def test_names_of_the_package():
    import unifmoe_dist

    assert {*unifmoe_dist.__all__, "kernels"} <= set(dir(unifmoe_dist))
    assert all(getattr(unifmoe_dist, name).__name__ == name for name in unifmoe_dist.__all__)
    assert not hasattr(unifmoe_dist, "no_such_name")
