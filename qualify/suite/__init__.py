"""The suite that qualifies one image with one checkpoint on one GPU model: stages, their server, the run directory."""
