"""From an export to a model in use: birth certificate, card, gate, approval, push, rollback."""
