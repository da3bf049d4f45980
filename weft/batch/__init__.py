"""Requests from a file, answers into a file."""
