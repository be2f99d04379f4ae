"""INFER elsewhere: another server as a replica."""
