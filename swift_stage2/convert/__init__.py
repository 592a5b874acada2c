"""Turns data sets that other programs wrote into rows, and rows into COCO: ``import`` and ``export``.

source_text       encodings, lines, numbers and flags as people's tools write them
import_report     each issue of a source: how often, and what became of it; the summary
sources           a picture's name, labels and boxes as a source gives them, and the files that its names stand for
coco_file         COCO's JSON in
yolo_folder       YOLO's label files in
voc_folder        Pascal VOC's XML in
rows              the rows of a picture: boxes on the picture that is there, prompts and answers
import_command    ``swift-stage2 import``
export_command    ``swift-stage2 export``: rows or predictions as COCO's JSON
"""
