"""What stages hand to each other: pairs, models, adapters, and what a training reads of them."""
