"""``inferd replay`` and ``inferd evaluate``: one file each, and what both share."""
