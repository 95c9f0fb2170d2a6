"""Records of runs, their worktrees and commits, DVC's lock file and cache, garbage collection, recovery."""
