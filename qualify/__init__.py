"""Qualification of horizon-images: what a checkpoint is, what an image does with it, and the proof."""
