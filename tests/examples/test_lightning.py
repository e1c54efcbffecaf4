"""Lightning trains an upcycled model as one rank does, clips and saves it rightly, on one device and on two."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from tests.examples.test_examples import run
from tests.support.one_rank import MICRO, RATE, STEPS, assert_same_weights, batches, loss_of, one_rank, whole_model
from tests.support.ranks import run_ranks

lightning = pytest.importorskip("lightning")


class Upcycled(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = whole_model()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=RATE)


def trained(rank: int, world: int, folder: str) -> bool:
    """On this rank's batches, with accumulation and clipping; then the checkpoint, opened again."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    own = [images for step in range(STEPS) for images in batches(step, world)[:, rank]]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        plugins=[LightningEnvironment()],
        max_epochs=1,
        accumulate_grad_batches=MICRO,
        gradient_clip_val=0.3,
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    module = Upcycled()
    trainer.fit(module, torch.utils.data.DataLoader(own, batch_size=None))
    assert trainer.global_step == STEPS
    whole: nn.Module = one_rank(0.3, world)[-1][2]
    assert_same_weights(module.model, whole)
    saved = trainer.checkpoint_callback.best_model_path
    assert_same_weights(Upcycled.load_from_checkpoint(saved).model, whole)
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_lightning_trains_as_one_rank(world, tmp_path):
    assert run_ranks(world, trained, str(tmp_path), fresh=True) == [True] * world


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])  # the test above has two
def test_the_example(devices, tmp_path):
    printed = re.search(r"(\d) process\(es\): accuracy (\S+)", run("lightning_module.py", tmp_path, str(devices)))
    assert int(printed[1]) == devices and float(printed[2]) > 0.4  # of ten digits by other writers
