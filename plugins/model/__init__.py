"""The decoder model that executes checkpoints: its inputs, its cache, in PyTorch and in native kernels."""
