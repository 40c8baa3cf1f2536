"""What a family is made of: its readers, and the names of its tensors."""
