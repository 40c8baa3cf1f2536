"""GGUF files, as llama.cpp writes and reads them: what they say of a model, and their tokenizer. Without torch."""
