"""The stage `prepare`: from raw rows to tokenised pairs: row shapes, templates, duplicates, the split, the data card."""
