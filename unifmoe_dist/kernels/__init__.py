"""Block-sparse expert kernels, one meaning: the reference defines it, the others compute only selected blocks."""

from unifmoe_dist.kernels.grouped import grouped_block_ffn
from unifmoe_dist.kernels.reference import reference_block_ffn

__all__ = ["grouped_block_ffn", "reference_block_ffn"]
