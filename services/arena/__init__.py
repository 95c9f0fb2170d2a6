"""`dpo arena`: people compare two answers, blind and in random order (docs/feedback.md)."""
