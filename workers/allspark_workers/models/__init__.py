"""Model families, and the loaders that read them from safetensors and GGUF."""
