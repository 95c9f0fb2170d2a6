"""Row shapes: how a row of each known layout becomes preference pairs, and what cannot be one."""
