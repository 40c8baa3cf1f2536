"""Families of grouped-query attention that is alike in all layers, but where a config.json says so of a window."""
