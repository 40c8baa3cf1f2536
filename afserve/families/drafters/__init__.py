"""What may stand beside a served model and guess for it: heads that were trained for it, and small models."""
