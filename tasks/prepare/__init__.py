"""The stage `prepare`: raw rows to tokenised pairs. Row shapes, templates, duplicates, the split, the data card."""
