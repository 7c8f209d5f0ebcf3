"""How far trained networks reach past their trained window: ``python -m tasks.enwik8 length``."""
