"""``python -m weightbus.cli``: the command without its script, for a checkout on PYTHONPATH."""

from weightbus.cli import main

if __name__ == "__main__":
    main()
