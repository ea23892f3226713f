"""Drafters: what a drafter is, and what it needs to train and to decode."""
