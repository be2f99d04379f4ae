"""A checkpoint's notation of reasoning and tool calls: its description, and what follows from it.

One description (``format``) gives the parser of an answer (``parser``), the grammar that constrains it, and the text
of a synthetic call. Nothing here knows requests, sequences or tensors.
"""
