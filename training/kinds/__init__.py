"""One file per kind of dialogue that the corpus is made of."""
