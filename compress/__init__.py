"""Makes checkpoints smaller: quantization, pruning, distillation. Writes Hugging Face folders, serves nothing."""
