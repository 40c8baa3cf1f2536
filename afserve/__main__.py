"""`python -m afserve` is `afserve`."""

from afserve.cli.main import main

if __name__ == "__main__":
    main()
