"""inferd beside other engines for language models, in one run."""
