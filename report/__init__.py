"""The report: one HTML page, and the README's table, from receipts, benchmark files and recipes.

Outside ``qualify/``, which is part of the image: how a page looks makes no other image. Standard library alone.
``command`` is the command, ``sources`` reads the files, ``models`` says which model a file is of, ``floors`` what the
hardware allows, ``svg`` draws, ``page`` and ``readme`` write. docs/report.md says what is on the page.
"""
