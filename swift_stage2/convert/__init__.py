"""Turns data sets that other programs wrote into rows, and rows into COCO: ``import`` and ``export``.

import_report     each issue of a source: how often, and what became of it; the summary
sources           text, pictures, labels and boxes as people's tools write them, and the files that they mean
coco_file         COCO's JSON in
yolo_folder       YOLO's label files in
voc_folder        Pascal VOC's XML in
rows              the rows of a picture: boxes on the picture that is there, prompts and answers
import_command    ``swift-stage2 import``
export_command    ``swift-stage2 export``: rows or predictions as COCO's JSON
"""
