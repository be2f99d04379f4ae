"""Answers that were computed before."""
