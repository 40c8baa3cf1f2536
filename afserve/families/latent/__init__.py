"""Families of latent attention, some with an indexer that chooses what is attended."""
