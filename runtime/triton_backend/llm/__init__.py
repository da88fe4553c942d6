"""The model `tensorrt_llm`: token ids in, token ids out."""
