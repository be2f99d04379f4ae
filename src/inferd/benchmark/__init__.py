"""Load generation and reports."""
