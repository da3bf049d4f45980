"""Forms of answers as masks over tokens."""
