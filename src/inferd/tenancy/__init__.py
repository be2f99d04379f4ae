"""RECEIVE, before any cost: who asks, what they may do, and how much of it."""
