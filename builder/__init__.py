"""From checkpoints to an engine directory."""
