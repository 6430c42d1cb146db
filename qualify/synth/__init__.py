"""Synthetic checkpoints in the exact tensor layout of a published config.

``layout`` decides which tensors there are and in which shard each lies, ``conditioning`` what their values look like,
``values`` draws them (the one module that needs torch), ``tokenizer`` adds a tokenizer, ``writer`` puts the files in
place, ``command`` is the command line. A synthetic checkpoint says so in ``config.json``, in every shard's metadata,
in the index and in ``synthetic.json``: it can qualify no published one. ``docs/synthetic.md`` says more.
"""
