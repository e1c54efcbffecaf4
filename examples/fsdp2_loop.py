"""Experts spread over ranks in a loop of your own on FSDP 2: everything else is sharded over all ranks.

torchrun --nproc-per-node 4 examples/fsdp2_loop.py      on four CPU processes, or one per GPU
"""

import os

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unifmoe_dist import clip_grad_norm_, diversity_loss, upcycle
from unifmoe_dist.leaving import leave

dist.init_process_group()
rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0))
device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images, half = images.float().view(-1, 1, 8, 8) / 8 - 0.6, len(images) // 2

# Pairs of ranks hold all experts between them; the pairs are copies of each other.
mesh = init_device_mesh(device.type, (max(1, world // 2), min(2, world)), mesh_dim_names=("replica", "expert"))
torch.manual_seed(0)  # the same dense model and routers on every rank
model = timm.create_model(
    "deit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=10, depth=4, embed_dim=96
)
model = upcycle(model, layers=[1, 3], num_experts=4, num_blocks=8, expert_group=mesh["expert"]).to(device)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)  # leaves the experts to their ranks by itself
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # every rank draws its own batches
for _ in range(60):
    batch = torch.randint(half, (64 // world,))
    loss = F.cross_entropy(model(images[batch].to(device)), labels[batch].to(device)) + 0.01 * diversity_loss(model)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model, 1.0)  # torch's own does not take FSDP's tensors beside others
    optimizer.step()

with torch.no_grad():
    hits = (model.eval()(images[half:].to(device)).argmax(-1).cpu() == labels[half:]).float().mean().item()
if rank == 0:
    print(f"{world} ranks: loss {loss.item():.3f}, accuracy {hits:.3f}")
leave()  # not through the interpreter's own end, which may abort while gloo's threads run
