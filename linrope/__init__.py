"""Linear attention with rotary positions."""
