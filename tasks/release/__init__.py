"""Releasing an exported model: manifest, model card, gate, approval, rollback, copies to other stores."""
