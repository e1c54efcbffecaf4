"""Block-sparse expert kernels, one meaning: the reference defines it, the others compute only selected blocks."""

from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.grouped import grouped_block_ffn
from unifmoe_dist.kernels.reference import reference_block_ffn
from unifmoe_dist.kernels.select import (
    KERNELS,
    block_ffn,
    chosen_kernels,
    masks_in_place,
    pack_tokens,
    route_tokens,
    shared_and_residual_ffn,
    takes_triton,
    use_kernels,
)

__all__ = [
    "KERNELS",
    "HiddenDropout",
    "block_ffn",
    "chosen_kernels",
    "grouped_block_ffn",
    "masks_in_place",
    "pack_tokens",
    "reference_block_ffn",
    "route_tokens",
    "shared_and_residual_ffn",
    "takes_triton",
    "use_kernels",
]
