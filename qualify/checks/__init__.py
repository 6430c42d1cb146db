"""Pytest modules that run inside the image, one per qualification stage."""
