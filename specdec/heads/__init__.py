"""Draft heads: what they are, how they are stored, and how they make trees."""
