"""Model families: one file each reads its `config.json` into a shape and names its tensors; `table` lists them.

Nothing here imports torch or opens a checkpoint's tensors.
"""
