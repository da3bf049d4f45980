"""Jobs in, tokens out."""
