"""Trains the bundled classifiers: digits and intents, each one script that writes one small ONNX file."""
