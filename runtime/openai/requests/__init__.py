"""From bodies of requests to prompts and sampling parameters."""
