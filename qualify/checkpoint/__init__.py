"""What a checkpoint on disk is: headers, files, declared format, scales.

Standard library only, no weights read.
"""
