"""An upcycled model for other runtimes, for batches of any size: `python examples/export.py`

By torch.export, compiled ahead of time by AOTInductor, or as ONNX on onnxruntime, it gives what it gives here.
"""

import onnxruntime
import timm
import torch

from unifmoe_dist import upcycle

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, depth=2, embed_dim=48, num_heads=3)
model = upcycle(model, layers=[1], num_experts=4, num_blocks=8).eval().requires_grad_(False)
images, others = torch.randn(4, 3, 32, 32), torch.randn(9, 3, 32, 32)
any_batch = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)}


def show(name, output):
    print(f"{name}: largest difference {(output - model(others)).abs().max():.1e}")


program = torch.export.export(model, (images,), **any_batch)
torch.export.save(program, "exported.pt2")
# A process that loads this file or the next imports unifmoe_dist.kernels.operators first, as this one has.
show("torch.export", torch.export.load("exported.pt2").module()(others))

torch._inductor.aoti_compile_and_package(program, package_path="compiled.pt2")
show("AOTInductor", torch._inductor.aoti_load_package("compiled.pt2")(others))

# To ONNX goes the definition of the layer, which computes every block and masks: no operator of this package is left.
torch.onnx.export(model, (images,), "model.onnx", dynamo=True, verbose=False, **any_batch)
session = onnxruntime.InferenceSession("model.onnx")
(output,) = session.run(None, {session.get_inputs()[0].name: others.numpy()})
show("onnxruntime", torch.from_numpy(output))
