"""Merge a policy into its base model and write it for other tools."""
