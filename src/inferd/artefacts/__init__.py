"""Files as artefacts: their digests, signatures over them, and verified copies of them.

Start with ``manifest.py`` (what a file or folder holds, by content). ``copying.py`` reads each byte once, to hash and to
copy it, and ``download.py`` does the same with an HTTP server. Knows files and bytes; knows no model and no setting.
"""
