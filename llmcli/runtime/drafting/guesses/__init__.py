"""Guesses of one draft: how they are chosen, and which rows of a pass the text has kept."""
