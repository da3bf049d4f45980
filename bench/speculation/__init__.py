"""Measures speculation: its speed on a GPU and of the demo model, and whether it changes a token."""
