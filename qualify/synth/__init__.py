"""Synthetic checkpoints in the exact tensor layout of a published config.

``layout`` decides which tensors there are and in which shard each lies (standard library only), ``values``
fills one tensor, ``writer`` streams the files, ``command`` is the command line. A synthetic checkpoint says
so in ``config.json``, in every shard's metadata and in ``synthetic.json``: it can qualify no published one.
"""
