"""Many callers, one engine; and what is counted of it."""
