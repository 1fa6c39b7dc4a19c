"""Neural networks as kernel streams for the same scheduler."""
