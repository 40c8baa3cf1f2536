"""Families some of whose layers keep a state of fixed size in the place of keys and values."""
