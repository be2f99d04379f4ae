"""The built-in operations of pipelines: each a small pure function from arrays to arrays, with typed options."""
