"""Who guesses tokens: draft models and heads are found, checked and loaded, and the speculation made."""
