"""What a policy is worth: its answers, who judges them, win rates and intervals, and one policy beside another."""
