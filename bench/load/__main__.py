"""`python -m bench.load` is one client process of a load; `bench.load.run` starts it."""

from services import process

process.run("bench.load.driver")
