"""Small matrices beside frozen large ones: empty so far."""
