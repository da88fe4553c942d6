"""Pure functions of rows: distributions, draws, acceptance."""
