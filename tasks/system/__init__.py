"""Files, locks, processes, progress, redaction and signatures on one machine."""
