"""The dialect of text-generation-inference (TGI).

Knows its fields, events and errors. Does not know replicas, and parses no text of a model. Read ``generate.py`` first.
"""
