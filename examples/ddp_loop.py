"""Experts spread over ranks in a loop of your own on DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_loop.py        on two CPU processes, or one per GPU
"""

import os

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

from unifmoe_dist import clip_grad_norm_, diversity_loss, full_state_dict, upcycle
from unifmoe_dist.leaving import leave

dist.init_process_group()
rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0))
device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images, half = images.float().view(-1, 1, 8, 8) / 8 - 0.6, len(images) // 2

torch.manual_seed(0)  # the same dense model and routers on every rank
model = timm.create_model(
    "deit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=10, depth=4, embed_dim=96
)
model = upcycle(model, layers=[1, 3], num_experts=4, num_blocks=8, expert_group=dist.group.WORLD).to(device)
model = DistributedDataParallel(model)  # leaves the experts to their ranks by itself
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # every rank draws its own batches
for _ in range(60):
    batch = torch.randint(half, (64 // world,))
    loss = F.cross_entropy(model(images[batch].to(device)), labels[batch].to(device)) + 0.01 * diversity_loss(model)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model, 1.0)  # by the norm over all ranks; torch's own finds the same here
    optimizer.step()

with torch.no_grad():  # every rank: its tokens visit all ranks' experts
    hits = (model.eval()(images[half:].to(device)).argmax(-1).cpu() == labels[half:]).float().mean().item()
state = full_state_dict(model)  # all experts, on rank 0
if rank == 0:
    torch.save(state, "ddp_loop.pt")  # load_full_state_dict takes it on any number of ranks
    experts = state["blocks.1.mlp.experts.keys"].shape[0]
    print(f"{world} ranks, {experts} experts: loss {loss.item():.3f}, accuracy {hits:.3f}")
leave()  # not through the interpreter's own end, which may abort while gloo's threads run
