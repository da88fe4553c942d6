"""The step: scheduling, acceptance, commit; requests and the blocks that they hold."""
