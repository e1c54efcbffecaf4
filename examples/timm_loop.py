"""A timm model in a training loop of your own: no DeepSpeed, no launcher. `python examples/timm_loop.py`"""

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from unifmoe_dist import diversity_loss, upcycle

torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 8 - 0.6

model = timm.create_model("deit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10,
                          depth=4, embed_dim=96)  # fmt: skip
model = upcycle(model, layers=[1, 3], num_experts=4, num_blocks=8)  # with pretrained=True, the weights' FFNs are copied
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for _ in range(120):
    batch = torch.randint(len(images) // 2, (64,))
    loss = F.cross_entropy(model(images[batch]), labels[batch]) + 0.01 * diversity_loss(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    half = len(images) // 2
    accuracy = (model.eval()(images[half:]).argmax(-1) == labels[half:]).float().mean().item()
print(f"accuracy {accuracy:.3f}")
