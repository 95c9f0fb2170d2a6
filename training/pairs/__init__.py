"""Preference pairs, and the packed rows in which a training step computes them."""
