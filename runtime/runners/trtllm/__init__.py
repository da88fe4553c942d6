"""Executing engines that TensorRT-LLM compiled."""
