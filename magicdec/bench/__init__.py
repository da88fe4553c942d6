"""Measuring: grids of contexts, batches and ways to draft; results, tables, plots."""
