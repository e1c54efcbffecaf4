"""A loop of your own on Accelerate. `accelerate launch examples/accelerate_loop.py` on any number of GPUs."""

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from unifmoe_dist import diversity_loss, upcycle

accelerator = Accelerator()  # with `accelerate config`, this is where DeepSpeed, bf16 or FSDP come in
torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
data = TensorDataset(images.float().view(-1, 1, 8, 8) / 8 - 0.6, labels)

model = timm.create_model("deit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10,
                          depth=4, embed_dim=96)  # fmt: skip
model = upcycle(model, layers=[1, 3], num_experts=4, num_blocks=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))

for image, label in loader:  # one pass
    loss = F.cross_entropy(model(image), label) + 0.01 * diversity_loss(accelerator.unwrap_model(model))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
accelerator.print(f"loss {loss.item():.3f}")
