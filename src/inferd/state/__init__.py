"""What outlives the process: one schema, two databases."""
