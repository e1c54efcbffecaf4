"""A loop of your own on Accelerate.

accelerate launch examples/accelerate_loop.py                                             on any number of GPUs
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/accelerate_loop.py           on two CPU processes
"""

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from unifmoe_dist import diversity_loss, upcycle
from unifmoe_dist.leaving import leave

accelerator = Accelerator()  # with `accelerate config`, this is where DeepSpeed, bf16 or FSDP come in
torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images, half = images.float().view(-1, 1, 8, 8) / 8 - 0.6, len(images) // 2
training = DataLoader(TensorDataset(images[:half], labels[:half]), batch_size=32, shuffle=True, drop_last=True)
test = DataLoader(TensorDataset(images[half:], labels[half:]), batch_size=128)

model = timm.create_model(
    "deit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, depth=4, embed_dim=96
)
model = upcycle(model, layers=[1, 3], num_experts=4, num_blocks=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, training, test = accelerator.prepare(model, optimizer, training, test)

for _ in range(6):
    for image, label in training:
        loss = F.cross_entropy(model(image), label) + 0.01 * diversity_loss(accelerator.unwrap_model(model))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

model.eval()
with torch.no_grad():
    hits = [accelerator.gather_for_metrics(model(image).argmax(-1) == label) for image, label in test]
accuracy = torch.cat(hits).float().mean().item()
accelerator.print(f"{accelerator.num_processes} process(es): loss {loss.item():.3f}, accuracy {accuracy:.3f}")
accelerator.end_training()
leave()  # not through the interpreter's own end, which may abort while gloo's threads run
