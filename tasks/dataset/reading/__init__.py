"""From an address to raw rows: fetching, file formats, limits, and where a row came from."""
