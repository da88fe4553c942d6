"""Where things lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
