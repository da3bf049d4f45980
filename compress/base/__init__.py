"""The network that is compressed, as transformers has it, and changes of its weights."""
