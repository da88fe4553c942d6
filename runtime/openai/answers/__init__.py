"""From outputs of the engine to what clients read."""
