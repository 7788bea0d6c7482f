"""GGUF files, llama.cpp's format: one file with metadata, tokenizer and tensors."""
