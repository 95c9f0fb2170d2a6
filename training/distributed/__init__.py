"""Process groups, and rows or layers that the ranks of a group share."""
