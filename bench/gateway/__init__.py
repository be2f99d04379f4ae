"""What a gateway costs: relayed requests, streamed chunks, latency, memory and start, beside its peers."""
