"""Turns data sets that other programs wrote into rows, and rows into COCO: ``import`` and ``export``.

source_text       encodings, lines, numbers and flags as people's tools write them
import_report     each issue of a source: how often, and what became of it; the summary
annotated_image   a picture's name, labels and boxes as a source gives them; the names of its classes
image_folder      the pictures that sources' names stand for
coco_file         COCO's JSON in
yolo_folder       YOLO's label files in
voc_folder        Pascal VOC's XML in
placement         boxes on the picture that is there: clipped, or left out
row_style         prompts, answers and orders; the rows of a picture
import_command    ``swift-stage2 import``
export_command    ``swift-stage2 export``: rows or predictions as COCO's JSON
"""
