"""Enwik8 and other bytes: data and the command line."""
