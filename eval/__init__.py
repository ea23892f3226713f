"""Evaluation: verify, decode, measure, report."""
