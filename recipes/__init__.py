"""Recipes: one YAML file describes one reproducible run."""
