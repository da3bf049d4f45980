"""What steps with guesses need on the device: passes of a draft, its hidden states, and which guesses are right."""
