"""What is imported when: help and mistakes in options need no PyTorch, and the layer no compiler and no trainer."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import licences
from unifmoe_dist.runtime import extras

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
before = {*sys.modules}
import unifmoe_dist
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, diversity_loss, upcycle
new = sys.modules.keys() - before
others = {name.partition(".")[0] for name in new} - sys.stdlib_module_names - {"unifmoe_dist"}
assert others <= {"pydantic", "pydantic_core", "annotated_types", "typing_inspection"}, others
assert not [name for name in new if name.startswith("torch.")] and len(new) < 150, (len(new), new)
assert "unifmoe_dist.config.training" not in new  # options of runs, which are many to check
layer = UniFMoELayer(UniFMoEConfig(8, 16, 4, 4))
(layer(torch.randn(5, 8)).sum() + layer.diversity_loss()).backward()
assert unifmoe_dist.kernels.use_kernels and unifmoe_dist.routing.Router  # as after importing everything
heavy = {"torch._dynamo", "torch._inductor", "triton", "transformers", "timm", "deepspeed", "sympy"}
found = heavy & sys.modules.keys()
assert not found, found
"""

ABSENT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""Makes an environment without the modules named in `absent`."""

ALONE = """
import copy, torch
from torch import nn
from unifmoe_dist import upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))

def train(method):
    named = dict(ffns={"0": ("up", "act", "down"), "1": ("up", "act", "down")}, num_experts=4, num_blocks=4)
    model = upcycle(nn.Sequential(Block(), Block()), method=method, **named)
    auxiliary = sum(layer.auxiliary_loss() for layer in moe_layers(model).values())
    (model(torch.randn(3, 5, 16)).square().mean() + auxiliary).backward()
    torch.save(model.state_dict(), sys.argv[1])
    copy.deepcopy(model.eval()).load_state_dict(torch.load(sys.argv[1]))

for method in ("unif", "topk", "gmoe", "dynmoe", "mass"):
    train(method)
try:
    train("emoe")
except UserError as error:
    assert "numpy is not installed, which this needs: pip install 'unifmoe-dist[train]'." in str(error), error
else:
    raise AssertionError("EMoE needs scikit-learn")
"""

TIMM = """
import timm, torch
from safetensors.torch import load_model, save_model
from unifmoe_dist import upcycle
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3)
model = upcycle(model, [1], num_experts=3, num_blocks=4).eval()
x = torch.randn(2, 3, 32, 32)
before = model(x)
save_model(model, sys.argv[1])
torch.nn.init.zeros_(model.blocks[1].mlp.experts.keys)
load_model(model, sys.argv[1])
assert torch.equal(model(x), before)
"""

TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification
from unifmoe_dist import upcycle
config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
model = upcycle(BertForSequenceClassification(config), [1], num_experts=3, num_blocks=4).eval()
tokens = torch.tensor([[1, 2, 3, 0]])
before = model(tokens, attention_mask=tokens > 0).logits
model.save_pretrained(sys.argv[1])
after = BertForSequenceClassification.from_pretrained(sys.argv[1]).eval()(tokens, attention_mask=tokens > 0).logits
torch.testing.assert_close(after, before)
"""

COMMANDS = """
import contextlib, io, runpy
from pathlib import Path
for path in sorted(Path("launch").glob("[a-z]*.py")):
    sys.argv, said, status = [str(path), "--help"], io.StringIO(), None
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except ModuleNotFoundError:
            try:
                sys.excepthook(*sys.exc_info())  # as at the end of a process
            except SystemExit as left:
                status = left.code
        except SystemExit as left:  # the doctor's own
            said.write(str(left.code))
            status = 2
    if path.stem == "gpu_check":  # it runs where nothing is installed
        assert said.getvalue() == "0", said.getvalue()
        continue
    assert status == 2 and "Traceback" not in said.getvalue(), path
    assert "is not installed" in said.getvalue() or path.stem == "doctor", (path, said.getvalue())
    assert "pip install 'unifmoe-dist[train]'" in said.getvalue(), (path, said.getvalue())
    print(path.stem)
"""


def run(code: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(*brought: str) -> str:
    """Code that hides all installed libraries but the project's own needs, and what some others bring."""
    names = [requirement.name for requirement in licences.requirements()[""]]
    there = licences.closure([*names, *brought]).keys()
    by_module = importlib.metadata.packages_distributions()
    absent = [
        m for m, owners in by_module.items() if not {licences.canonical(o) for o in owners} & {*there, "unifmoe-dist"}
    ]
    assert {"deepspeed", "jsonargparse", "pandas"} <= {*absent}
    return f"absent = {absent!r}\n{ABSENT}"


def test_help_and_mistakes_in_options_import_no_torch():
    assert {"train", "sweep", "scale", "evaluate", "analyze", "doctor"} <= set(run(HELP).split())


def test_the_layer_and_upcycling_import_no_compiler():
    run(LAYER)


@pytest.mark.parametrize(
    "code,brought",
    [(ALONE, []), (TIMM, ["timm"]), (TRANSFORMERS, ["transformers"])],
    ids=["alone", "timm", "transformers"],
)
def test_the_library_needs_its_own_dependencies_alone(code, brought, tmp_path):
    """Training, saving and loading, in an environment of `pip install unifmoe-dist` and the model's own library."""
    run(without(*brought) + code, str(tmp_path / "saved"))


def test_commands_say_which_extra_is_missing():
    assert {"train", "sweep", "doctor", "main_job"} <= set(run(without() + COMMANDS).split())
    owners = importlib.metadata.packages_distributions()
    named = {licences.canonical(owner) for module in extras.TRAIN for owner in owners[module]}
    assert {licences.canonical(r.name) for r in licences.requirements()["train"]} == named
    error = ModuleNotFoundError("No module named 'mine'", name="mine")
    assert extras.explained(error) is error


def test_names_of_the_package():
    import unifmoe_dist

    assert {*unifmoe_dist.__all__, "kernels"} <= set(dir(unifmoe_dist))
    assert all(getattr(unifmoe_dist, name).__name__ == name for name in unifmoe_dist.__all__)
    assert not hasattr(unifmoe_dist, "no_such_name")
