"""Ends runs in which nothing moves, or whose other ranks have died."""
