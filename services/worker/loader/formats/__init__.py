"""One reader per foreign format: of quantized weights, and of SentencePiece's tokenizers."""
