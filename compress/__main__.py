"""`python -m compress`, which is `weft compress`."""

from compress.cli import app

if __name__ == "__main__":
    app(prog_name="weft compress")
