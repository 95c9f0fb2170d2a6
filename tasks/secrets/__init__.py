"""What keeps keys and passwords private: which files nobody may name, and what is removed from every message."""
