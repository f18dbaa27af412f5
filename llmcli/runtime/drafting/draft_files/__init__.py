"""Files that a drafter reads besides the model: EAGLE-3 drafts, draft heads, draft models."""
