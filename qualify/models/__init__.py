"""What a published config promises: the tensors of a checkpoint, derived from its ``config.json`` alone."""
