"""Training on DeepSpeed: command line, ranks, data order, checkpoints and the training loop."""
