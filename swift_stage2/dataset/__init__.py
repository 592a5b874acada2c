"""Checks a training JSONL row by row, without a model: for ``data check``, doctor, launch and train.

fault         what is wrong with a row, and where it stands
files         which files a configuration names, and their lines
picture       an image's stored size and EXIF orientation; writes a data set anew with upright images
labels        how a label may be spelt
row_check     one row against every rule
survey        all rows of all files; which format their answers have
conventions   in which numbers boxes may be written
coordinates   in which convention a model's answers, or the rows, are
command       ``swift-stage2 data check``
"""
