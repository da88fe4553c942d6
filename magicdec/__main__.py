"""`python -m magicdec` is the `magicdec` command."""

from magicdec.cli import main

if __name__ == "__main__":
    main()
