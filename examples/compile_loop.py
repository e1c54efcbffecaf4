"""An upcycled model compiled whole, as one graph: `python examples/compile_loop.py [BACKEND]`

A compiled training step gives the loss and the gradients of eager mode, and other batch sizes do not compile anew.
"""

import copy
import sys

import timm
import torch
import torch.nn.functional as F

from unifmoe_dist import diversity_loss, upcycle

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, depth=1, embed_dim=48, num_heads=3)
model = upcycle(model, layers=[0], num_experts=4, num_blocks=8)
eager = copy.deepcopy(model)
backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)  # a graph break would be an error

for size in (4, 6, 9):
    images, labels = torch.randn(size, 3, 32, 32), torch.randint(10, (size,))
    for run, trained in ((compiled, model), (eager, eager)):
        trained.zero_grad()
        loss = F.cross_entropy(run(images), labels) + 0.01 * diversity_loss(trained)
        loss.backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    difference = max((a.grad - b.grad).abs().max() for a, b in pairs)
    print(f"batch of {size}: loss {loss:.3f}, largest difference between gradients {difference:.1e}")
