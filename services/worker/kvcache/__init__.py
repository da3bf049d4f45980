"""Contents of KV blocks and where they may be."""
