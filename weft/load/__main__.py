"""`python -m weft.load` is one client process of a load; `weft.load.run` starts it."""

from services import process

process.run("weft.load.driver")
