"""A timm model in a LightningModule, with gradient clipping and Lightning's checkpoints.

python examples/lightning_module.py         one device: a GPU if there is one
python examples/lightning_module.py 2       two, with DistributedDataParallel: GPUs, or CPU processes
"""

import sys

import lightning
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from unifmoe_dist import diversity_loss, param_groups, upcycle
from unifmoe_dist.leaving import leave


class Upcycled(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        dense = timm.create_model(
            "deit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, depth=4, embed_dim=96
        )
        self.model = upcycle(dense, layers=[1, 3], num_experts=4, num_blocks=8)

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels) + 0.01 * diversity_loss(self.model)

    def validation_step(self, batch, index):
        images, labels = batch
        hits = (self.model(images).argmax(-1) == labels).float()
        self.log("accuracy", hits.mean(), sync_dist=True, prog_bar=True)  # over all processes

    def configure_optimizers(self):
        return torch.optim.AdamW(param_groups(self.model, weight_decay=0.05), lr=1e-3)


devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
lightning.seed_everything(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images, half = images.float().view(-1, 1, 8, 8) / 8 - 0.6, len(images) // 2
training = DataLoader(TensorDataset(images[:half], labels[:half]), batch_size=32 // devices, shuffle=True)
test = DataLoader(TensorDataset(images[half:], labels[half:]), batch_size=128)

trainer = lightning.Trainer(
    devices=devices,
    strategy="ddp" if devices > 1 else "auto",
    plugins=[LightningEnvironment()],  # else it asks mpi4py, which may be there without MPI; on Slurm leave it out
    max_epochs=6,
    gradient_clip_val=1.0,
    default_root_dir="runs/lightning",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Upcycled(), training, test)
best = Upcycled.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
(score,) = trainer.validate(best, test, verbose=False)
if trainer.is_global_zero:
    print(f"{trainer.world_size} process(es): accuracy {score['accuracy']:.3f}")
leave()  # not through the interpreter's own end, which may abort while gloo's threads run
