"""The Open Inference Protocol of KServe and Triton."""
