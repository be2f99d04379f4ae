"""What exists: where models come from."""
