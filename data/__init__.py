"""Data: prompts, the target's answers to them, and batches made of both."""
