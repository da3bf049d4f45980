"""Guesses of tokens: who proposes them, and how many of them a step computes."""
