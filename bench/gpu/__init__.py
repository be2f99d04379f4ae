"""Everything that only a GPU can show, in one command: `python -m bench.gpu`."""
