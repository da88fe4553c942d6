"""The native CPU library and its wrappers."""
