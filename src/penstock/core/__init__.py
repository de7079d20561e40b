"""The vocabulary of Penstock. Imports nothing of ours and no torch."""
