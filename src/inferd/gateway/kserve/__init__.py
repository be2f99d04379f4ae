"""KServe v2 over REST with Triton's extensions, and the row APIs of KServe v1 and MLflow.

Knows the paths, parameters and metadata of the Open Inference Protocol. Does not know tensors: a worker
decodes a request's body. gRPC shares ``models.py`` with REST. Read first: ``rest.py``.
"""
