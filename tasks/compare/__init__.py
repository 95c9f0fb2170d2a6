"""Comparing models that are trained already: `dpo compare`, `dpo blame`, and scoring a model again on other data."""
