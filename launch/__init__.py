"""Starts the engine as an artifact's recipe says: plan, checks before the start, supervision, comparison after it."""
