"""What `task=` selects: one file a task. Imports nothing: what is refused needs no torch."""
