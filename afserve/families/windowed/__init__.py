"""Families of grouped-query attention whose layers differ: windows, chunks, rotary embedding."""
