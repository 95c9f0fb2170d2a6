"""`dpo init`: examines data, model and machine, and writes a recipe for them."""
