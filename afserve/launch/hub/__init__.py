"""Checkpoints from a Hugging Face hub, into its own cache: safetensors and text only, checked byte for byte."""
