"""Training: from a recipe to a trained drafter."""
