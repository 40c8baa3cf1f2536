"""`python -m afserve` is `afserve`. The command line is named, not imported: the package itself imports no room."""

from importlib import import_module

if __name__ == "__main__":
    import_module("afserve.cli.main").main()
