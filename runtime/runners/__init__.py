"""What executes a model: one interface, PyTorch and TensorRT-LLM behind it."""
