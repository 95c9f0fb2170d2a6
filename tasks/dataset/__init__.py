"""From raw rows to tokenised pairs on disk: fetching, reading, templates, deduplication, shards."""
