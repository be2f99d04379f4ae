"""The composition root: every part is built here once, wired, run, changed while it runs, and taken down."""
