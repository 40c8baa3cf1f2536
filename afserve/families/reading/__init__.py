"""What several families read of a `config.json`: attention, FFNs, how weights are stored, layers to plan with alone.

It knows no family.
"""
