"""MoE layers by method: UniF-MoE (`unifmoe_dist.layer`) and the paper's others, each in a file here. See `registry`."""
