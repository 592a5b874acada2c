"""Checks a training JSONL row by row, without a model: for ``data check``, doctor, launch and train.

fault         what is wrong with a row, and where it stands
files         which files a configuration names, and their lines
picture       an image's stored size and EXIF orientation
labels        how a label may be spelt
row_check     one row against every rule
survey        all rows of all files; which format their answers have
command       ``swift-stage2 data check``
"""
