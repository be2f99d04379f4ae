"""Model definitions: one file per kind of decoder; a family is an entry in a table.

Each is checked against transformers in the tests; transformers is never imported here, and nothing from
a checkpoint's folder is run.
"""
