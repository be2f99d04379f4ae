"""Models of an MLflow server: from ``mlflow:models:/churn@champion`` to files that can be loaded.

``uris.py`` reads the source, ``server.py`` asks the server, ``listing.py`` knows the files of a version,
``mlmodel.py`` and ``signature.py`` read what MLflow has written beside the model, and ``fetching.py`` downloads. A
client of our own: the package ``mlflow`` is not needed.
"""
