"""Models that others trained, in and out: empty so far."""
