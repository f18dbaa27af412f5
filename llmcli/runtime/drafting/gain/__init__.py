"""What a draft may gain: the chances of its guesses, the cost of a pass, and the best shape."""
