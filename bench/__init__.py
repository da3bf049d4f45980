"""What is measured, and the tools that measure it."""
