"""`dpo doctor`: whether this machine can do what is configured, and what a run will need."""
