"""A timm model in a training loop of your own: no DeepSpeed, no launcher. `python examples/timm_loop.py`

Trains a small model with UniF-MoE layers and the dense model that it is made from in the same way, and prints both.
"""

import copy

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from unifmoe_dist import diversity_loss, upcycle

STEPS = 80

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 8 - 0.6
half = len(images) // 2  # the second half is by other writers


def train(model, upcycled):
    torch.manual_seed(1)  # the same batches for both
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        batch = torch.randint(half, (64,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        if upcycled:
            loss = loss + 0.01 * diversity_loss(model)  # the layers' own loss beside that of your task
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (model.eval()(images[half:]).argmax(-1) == labels[half:]).float().mean().item()


torch.manual_seed(0)
dense = timm.create_model(
    "deit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=10, depth=4, embed_dim=96
)
model = upcycle(copy.deepcopy(dense), layers=[1, 3], num_experts=4, num_blocks=8)  # every expert a copy of its FFN
print(f"accuracy {train(model, True):.3f}, of the dense model {train(dense, False):.3f}")
