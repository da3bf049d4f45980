"""`python -m verify`, which is `weft verify`."""

from verify.cli import app

if __name__ == "__main__":
    app(prog_name="weft verify")
