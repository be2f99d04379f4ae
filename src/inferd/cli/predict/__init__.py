"""``inferd predict``: one prediction of a running server, from values, files, photos and tables.

Start with ``command.py``: the command. ``inputs.py`` makes the tensors of a request from what was written on the
command line, with ``layout.py`` (which shape a model wants) and ``pictures.py`` (pixels); ``outputs.py`` shows the
answer. Nothing here knows how a server is found: that is ``inferd.cli.running.control``'s.
"""
