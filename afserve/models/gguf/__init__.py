"""Models out of GGUF files: the folder that everything else reads, and numbers out of blocks."""
