"""Adapters on frozen matrices: LoRA, DoRA, NF4, and peft's files."""
