"""Files, locks, processes, progress, templates and signatures on one machine."""
