"""The demo models that ship with Weft, and the program that trains them. Nothing that serves imports this."""
