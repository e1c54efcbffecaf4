"""The registry of methods: a method is one file and one line."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unifmoe_dist.config.named import with_options
from unifmoe_dist.methods.registry import REGISTRY, find_method
from unifmoe_dist.train.cli import parse_train_config

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add a method")[2].partition("\n## ")[0]
FILE, LINE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)

TRAIN = """
import sys
from pathlib import Path
import torch
from transformers import BertConfig, BertForSequenceClassification
from unifmoe_dist import upcycle
from unifmoe_dist.methods.registry import find_method
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import export
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.upcycling import moe_layers

folder = Path(sys.argv[1])
words = ["--model.moe", "signs", "--steps", "2", "--eval_every", "2", "--data.batch_size", "4", "--baseline", "false"]
config = parse_train_config([*words, "--output", str(folder / "run")], prog="train.py")
config.validate(1)
with running_ranks(1) as ranks:
    summary = Trainer(config, ranks, folder / "run").fit()
assert (summary["best_step"], summary["moe"], summary["mean_expert_count"]) == (2, "signs", 1)
model = export.load_consolidated(export.consolidate(folder / "run", folder / "model.safetensors"))
assert {type(layer).__name__ for layer in moe_layers(model).values()} == {"SignLayer"}
small = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = upcycle(BertForSequenceClassification(small), [1], 4, method="signs")
model.save_pretrained(folder / "saved")
same = BertForSequenceClassification.from_pretrained(folder / "saved")
tokens = torch.arange(24).view(2, 12)
assert torch.equal(same(tokens).logits, model.eval()(tokens).logits)
assert find_method("signs").options == {"model.moe": "signs"}
"""


def test_a_method_is_one_file_and_one_line(tmp_path):
    """The method of CONTRIBUTING.md, added to a copy of the package, trains, is saved and reloaded."""
    package = shutil.copytree(ROOT / "unifmoe_dist", tmp_path / "unifmoe_dist")
    (package / "methods" / "signs.py").write_text(FILE)
    registry = package / "methods" / "registry.py"
    text = registry.read_text()
    last = next(line for line in text.splitlines(True) if line.strip().startswith('Method("mass"'))
    registry.write_text(text.replace(last, f"{last}        {LINE.strip()},\n"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_names_of_methods_are_compared_nowhere_else():
    """No `==`, `!=` or `in` against a value of model.moe outside methods/; families of rows may have the same words."""
    found = []
    for path in sorted([*ROOT.glob("unifmoe_dist/**/*.py"), *ROOT.glob("launch/*.py")]):
        if path.is_relative_to(ROOT / "unifmoe_dist/methods"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            sides = [*node.comparators, node.left] if isinstance(node, ast.Compare) else []
            names = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            families = any(isinstance(part, ast.Attribute) and part.attr == "family" for part in ast.walk(node))
            if names & (REGISTRY.keys() - {"none"}) and not families:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_rows_of_fixed_top_k_layers_on_glue(k):
    """Of the paper's equation, and with the cosine gate of the literature; the paper has K = 16 for both."""
    base = parse_train_config(["--config", str(ROOT / "configs/glue/cola.yaml")])
    for name, layer in ((f"top{k}", "topk"), (f"gmoe-top{k}", "gmoe")):
        model = with_options(base, find_method(name).options).model
        assert (model.moe, model.top_k, model.num_experts) == (layer, k, 16)
