"""An independent K2-Horizon in plain PyTorch float32, to compare an engine with. Needs torch and safetensors only.

Written from the published semantics, never from an engine's code: :mod:`formulas` has one function a formula,
:mod:`model` reads a checkpoint layer by layer, :mod:`faults` plants known errors, :mod:`compare` has the metrics and
:mod:`prompts` chooses tokens that reach every expert.
"""
