"""Several ranks: empty so far."""
