"""``python -m pydispatch``."""

from pydispatch.cli import main

if __name__ == "__main__":
    main()
