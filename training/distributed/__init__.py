"""Process groups, and models that the ranks of a group share."""
