"""``inferd plan``: the command, and its answer as text."""
