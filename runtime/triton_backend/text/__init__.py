"""The models `preprocessing` and `postprocessing`."""
