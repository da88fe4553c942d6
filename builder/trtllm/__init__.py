"""Compiling a checkpoint with TensorRT-LLM 1.2: its rules, the plan, the build."""
