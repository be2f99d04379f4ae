"""The body of a request: its compression, its decoding within limits of cost, and the faults of its types."""
