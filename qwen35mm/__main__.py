"""`python -m qwen35mm`: the command line."""

from qwen35mm.cli import main

if __name__ == "__main__":
    main()
