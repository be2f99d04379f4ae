"""How much a model takes, from its files alone, before anything is loaded."""
