"""Checkpoints of torch.distributed.checkpoint (DCP), which a run goes on from on any number of ranks.

torchrun --nproc-per-node 4 examples/distributed_checkpoint.py runs/dcp     saves after 30 steps, experts on 4 ranks
torchrun --nproc-per-node 2 examples/distributed_checkpoint.py runs/dcp     goes on, experts on 2 ranks
"""

import sys
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from unifmoe_dist import upcycle
from unifmoe_dist.leaving import leave

dist.init_process_group("gloo")
rank, world, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 8 - 0.6

torch.manual_seed(0)
model = timm.create_model(
    "deit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=10, depth=4, embed_dim=96
)
model = DistributedDataParallel(upcycle(model, [1, 3], num_experts=4, num_blocks=8, expert_group=dist.group.WORLD))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def state():
    weights, moments = get_state_dict(model, optimizer)  # this rank's experts, marked as such
    return {"model": weights, "optimizer": moments, "step": torch.tensor(0)}


start, goes_on = 0, folder.exists()
if goes_on:
    found = state()
    dcp.load(found, checkpoint_id=folder)  # every rank reads its experts, whoever wrote them
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    start = int(found["step"])

for step in range(start, start + 30):
    batch = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.all_reduce(loss := loss.detach() / world)
if not goes_on:
    dcp.save(state() | {"step": torch.tensor(step + 1)}, checkpoint_id=folder)
if rank == 0:
    print(f"{world} ranks: steps {start} to {step}, loss {loss.item():.4f}")
leave()  # not through the interpreter's own end, which may abort while gloo's threads run
