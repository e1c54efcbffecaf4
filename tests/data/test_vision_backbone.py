"""Vision backbones: weights, heads and dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.jobs import ROOT
from tests.support.tiny_images import TINY
from unifmoe_dist import upcycle
from unifmoe_dist.data.vision_backbone import build_backbone
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.upcycling import moe_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Weights for 224 pixels and 1,000 classes in the layout of DeiT's official checkpoints."""
    torch.manual_seed(1)
    weights = build_backbone(TINY, 1000, 224, "none").state_dict()
    path = tmp_path_factory.mktemp("weights") / "deit.pth"
    torch.save({"model": weights}, path)
    return path, weights


def test_local_weights_are_loaded_and_fitted(published, tmp_path):
    path, weights = published
    from safetensors.torch import save_file

    (tmp_path / "folder").mkdir()
    save_file(weights, tmp_path / "folder" / "model.safetensors")
    for source in (path, path.parent, tmp_path / "folder"):
        torch.manual_seed(2)
        model = build_backbone(TINY, 7, 32, str(source), dropout=0.1, drop_path=0.1)
        state = model.state_dict()
        assert state["head.weight"].shape == (7, 192) and state["pos_embed"].shape == (1, 5, 192)
        for name, weight in weights.items():
            assert name.startswith("head.") or name == "pos_embed" or torch.equal(state[name], weight), name
        torch.testing.assert_close(state["pos_embed"][:, 0], weights["pos_embed"][:, 0])
    same = build_backbone(TINY, 1000, 224, str(path)).state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())  # the classifier too


def test_a_distilled_backbone_has_two_classifiers(tmp_path):
    """Both were trained on the file's classes: where those are others, both are new."""
    distilled, path = "deit_tiny_distilled_patch16_224", tmp_path / "deit.pth"
    weights = build_backbone(distilled, 1000, 32, "none").state_dict()
    torch.save({"model": weights}, path)
    state = build_backbone(distilled, 7, 32, str(path)).state_dict()
    assert state["head.weight"].shape == state["head_dist.weight"].shape == (7, 192)
    assert all(torch.equal(state[name], weights[name]) for name in weights if not name.startswith("head"))
    same = build_backbone(distilled, 1000, 32, str(path)).state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())


def test_dropout_is_on_outputs_and_depth_is_stochastic():
    model = build_backbone(TINY, 7, 32, "none", dropout=0.2, drop_path=0.1)
    assert [(b.mlp.drop1.p, b.mlp.drop2.p, b.attn.proj_drop.p) for b in model.blocks] == [(0.0, 0.2, 0.2)] * 12
    assert model.pos_drop.p == 0.2 and model.blocks[11].drop_path2.drop_prob == pytest.approx(0.1)
    image = torch.randn(1, 3, 32, 32)
    assert not torch.equal(model.train()(image), model(image)) and torch.equal(model.eval()(image), model(image))


def test_a_dense_model_has_no_dropout_with_the_papers_settings():
    config = parse_train_config(
        ["--config", str(ROOT / "configs/domainbed/pacs.yaml"), "--data.held_out", "Sketch"]
    ).model
    model = build_backbone(TINY, 7, 32, "none", dropout=config.dropout, drop_path=config.drop_path)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.p] == []
    layers = upcycle(model, [8], 2, 8, hidden_dropout=config.hidden_dropout)
    assert moe_layers(layers)["blocks.8.mlp"].config.hidden_dropout == 0.1


def test_weights_that_cannot_be_had(published, tmp_path):
    def message(name, pretrained):
        with pytest.raises(UserError) as caught:
            build_backbone(name, 7, 32, pretrained)
        return str(caught.value)

    assert "--model.pretrained FILE" in message(TINY, None)  # tests are offline
    assert "nowhere.pth does not exist" in message(TINY, "nowhere.pth")
    assert "holds 0 weight files" in message(TINY, str(tmp_path))
    (tmp_path / "a.pth").write_bytes(b"nonsense")
    assert "does not fit the backbone" in message(TINY, str(tmp_path / "a.pth"))
    torch.save({"model": {"layer.weight": torch.zeros(2)}}, tmp_path / "b.pth")
    assert "lacks 150 weights" in message(TINY, str(tmp_path / "b.pth"))
    assert "does not fit the backbone" in message("vit_small_patch16_224", str(published[0]))
    assert "did you mean deit_small_patch16_224" in message("deit_smal_patch16_224", "none")
    assert "is no ViT" in message("resnet18", "none")
