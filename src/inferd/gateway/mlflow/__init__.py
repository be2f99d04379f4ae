"""MLflow's side of the server: its webhooks, and the registry of versions in the terms of MLflow's REST API."""
