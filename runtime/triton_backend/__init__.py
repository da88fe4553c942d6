"""Triton Inference Server: models with the tensors and the behaviour of NVIDIA's TensorRT-LLM backend."""
