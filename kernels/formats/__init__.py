"""How numbers are kept in fewer bits, in plain PyTorch: what several backends mean by the same bytes."""
