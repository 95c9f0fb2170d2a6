"""From rows of any shape to tokenised pairs: fetching, reading, the contract, splits, the data card; pairs on disk."""
