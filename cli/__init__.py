"""The command line `dpo`: parses arguments, calls flows, services and tasks, and prints their errors."""
