"""What a training JSONL says of itself, row by row, without a model: for ``data check``, doctor, launch and train.

fault         what is wrong with a row, and where it stands
files         which files a configuration names
picture       what a file's header and end tell of an image
row_check     one row against every rule
survey        all rows of all files; which format their answers have
orientation   writes rows and images anew so that no EXIF tag decides what a box means
command       ``swift-stage2 data check``; summary is how it shows what was found
"""
