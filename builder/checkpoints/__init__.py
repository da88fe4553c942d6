"""What is read: Hugging Face directories and GGUF files, and what they say of the model."""
