"""`python -m efcil`."""

from efcil.cli import main

if __name__ == "__main__":
    main()
