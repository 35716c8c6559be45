"""Training draft heads by self-distillation."""
