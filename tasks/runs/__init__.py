"""Pipeline runs: records, git worktrees and commits, DVC's lock file and cache, garbage collection, recovery."""
